"""A model's vision tower: transformers' own modules, without the language model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from slime_like.hf_class import uninitialised_weights
from slime_like.images.inputs import ImageInputs
from slime_like.images.settings import VisionSettings


class ImageTower(torch.nn.Module):
    """Turns images into features. Its parameters are in float32 at first, and not initialised."""

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self.settings = settings
        model = _model_without_text(settings)
        for name, _ in settings.family.modules:
            self.add_module(name, getattr(model, name))
        # a method, not its model: as a submodule its parameters would have two names
        self._get_image_features = model.get_image_features
        for module in self.modules():
            # tables of angles; transformers keeps them in float32 too
            module.float32_buffers = tuple(  # type: ignore[assignment]
                name for name, b in module.named_buffers(recurse=False) if b.is_floating_point()
            )
        self.requires_grad_(settings.trained)

    def train(self, mode: bool = True) -> ImageTower:
        """A frozen tower never drops anything out."""
        return super().train(mode and self.settings.trained)

    def recompute_layers(self) -> None:
        """Keep only the inputs of layers for the backward pass, which computes the rest again."""
        # the method of transformers' models would warn that a tower has no embeddings of tokens
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, inputs: ImageInputs) -> tuple[Tensor, list[Tensor]]:
        """The features of all images, [F, H], and those for the outputs of the first text layers,
        [F, H] each."""
        grids = {} if inputs.grids is None else {"image_grid_thw": inputs.grids}
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.settings.trained):
            seen = self._get_image_features(inputs.pixels, **grids, return_dict=True)
        deepstack = getattr(seen, "deepstack_features", None) or []
        return _flat(seen.pooler_output), [_flat(features) for features in deepstack]


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[F, H] of the features of each image."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.reshape(-1, joined.size(-1))


def _model_without_text(settings: VisionSettings) -> Any:
    from transformers import CONFIG_MAPPING, AutoModel

    given = json.loads(settings.config)
    given.pop("quantization_config", None)  # weights are dequantised when they are read
    config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    # as small as the language model can be: it is dropped at once
    text = config.get_text_config()
    text.vocab_size = 1
    text.num_hidden_layers = 0
    text.pad_token_id = None
    with uninitialised_weights():
        model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    del model.language_model
    return model.eval()


@cache
def tower_shapes(settings: VisionSettings) -> Mapping[str, tuple[int, ...]]:
    """Shape of every parameter, by its name in an `ImageTower`."""
    with torch.device("meta"):
        tower = ImageTower(settings)
    return {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}


def name_in_file(settings: VisionSettings, name: str) -> str:
    """The name in a Hugging Face file of a parameter of an `ImageTower`."""
    module, _, rest = name.partition(".")
    return dict(settings.family.modules)[module] + rest
