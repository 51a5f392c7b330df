"""Images in a language model: the vision tower on the first pipeline stage, its features in place
of placeholders' embeddings and in the outputs of the first layers, and rotary positions on three
axes.

The tower is transformers' own module, the same on every tensor- and context-parallel rank. Each of
them runs it on all images of a micro-batch and takes the features of its own rows, so its gradients
are partial sums under sequence parallelism, as those of norms, and complete without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from slime_like.autograd import AutogradContext
from slime_like.images.rows import ImagePass
from slime_like.images.settings import VisionSettings
from slime_like.images.tower import ImageTower
from slime_like.megatron.transfer import to_device

if TYPE_CHECKING:
    from slime_like.megatron.ops.attention import PackedRows


TOWER_PARAMETER = "is_vision_tower_parameter"  # attribute of the tower's parameters


class _TouchContext(AutogradContext, Protocol):
    shapes: Sequence[Tensor]


class _Touch(torch.autograd.Function):
    """Returns its first argument; the others get a gradient of 0. Data parallelism waits for a
    gradient of every parameter, also in a micro-batch without images."""

    @staticmethod
    def forward(ctx: _TouchContext, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _TouchContext, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (p.new_zeros(()).expand_as(p) for p in ctx.shapes)
        return gradients[0], *zeros


class _DepositContext(AutogradContext, Protocol):
    leaves: Sequence[Tensor]


class _Deposit(torch.autograd.Function):
    """Returns its first argument; the gradients of `features` are those of `leaves`, their detached
    copies. The first argument is the input of all layers that use these, so its gradient is known
    last. (Recomputed layers run their own backward pass, which would run the tower's once a layer
    if they used the features themselves.)"""

    @staticmethod
    def forward(
        ctx: _DepositContext, x: Tensor, leaves: Sequence[Tensor], *features: Tensor
    ) -> Tensor:
        ctx.leaves = leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _DepositContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *(leaf.grad for leaf in ctx.leaves)


class SeesImages(LanguageModule):
    """A language model, on a base (bases.py), that takes the images of `PackedRows`, if it was
    given a tower by `add_vision`."""

    decoder: Any
    rotary_pos_emb: Any
    vision: ImageTower  # of the first chunk of a network that sees images
    vision_settings: VisionSettings | None = None  # on all of its chunks

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        """See megatron-core's models."""
        if self.vision_settings is None:
            images = keywords["packed_seq_params"].images
            assert images is None, "the network was built without --multimodal-keys"
        elif hasattr(self, "vision") and decoder_input is None:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            images = keywords["packed_seq_params"].images
            decoder_input = with_features(embedded, self.vision, images)
        output: Tensor = super().forward(
            input_ids, position_ids, attention_mask, decoder_input, **keywords
        )
        return output

    def angles_of_images(self, rows: PackedRows) -> Tensor | None:
        """Rotary angles of rows with images, on three axes; None if they are plain."""
        if rows.images is None or rows.images.images.positions is None:
            return None
        assert self.vision_settings is not None
        return row_angles(
            rows.images.images.positions,
            self.rotary_pos_emb.inv_freq,
            self.vision_settings,
            neighbours=self.config.rotary_interleaved,
        )


def with_features(embedded: Tensor, tower: ImageTower, seen: ImagePass | None) -> Tensor:
    """Embeddings [T, 1, H] with those of placeholders replaced by the tower's features; the further
    ones are put into `seen`."""
    trains = tower.settings.trained and torch.is_grad_enabled()
    if seen is None:
        return _Touch.apply(embedded, *tower.parameters()) if trains else embedded
    images = seen.images
    features, deepstack = tower(to_device(images.inputs.load(), embedded.device))
    own = [part.index_select(0, images.features) for part in (features, *deepstack)]
    own = [part.to(embedded.dtype) for part in own]
    if trains and deepstack:
        leaves = [part.detach().requires_grad_() for part in own[1:]]
        seen.deepstack = tuple(leaves)
        embedded = _Deposit.apply(embedded, leaves, *own[1:])
    else:
        seen.deepstack = tuple(own[1:])
    return embedded.index_copy(0, images.rows, own[0].unsqueeze(1))


def row_angles(
    positions: Tensor, inverse: Tensor, settings: VisionSettings, *, neighbours: bool
) -> Tensor:
    """Rotary angles of all rows from their positions on three axes: [T, 1, 1, d].

    Args:
        positions: [3, T].
        inverse: [d / 2], a pair's angle per position.
        neighbours: Pairs are neighbouring dimensions, instead of one of each half.
    """
    axes = settings.family.axes
    assert axes is not None
    inverse = inverse.to(positions.device)
    by_axis = positions.to(inverse.dtype).unsqueeze(2) * inverse  # [3, T, d / 2]
    if axes.interleaved:
        angles = by_axis[0].clone()
        for axis in (1, 2):
            pairs = slice(axis, 3 * settings.sections[axis], 3)
            angles[:, pairs] = by_axis[axis][:, pairs]
    else:
        blocks = by_axis.split(settings.sections, dim=2)
        angles = torch.cat([block[axis] for axis, block in enumerate(blocks)], dim=1)
    both = angles.repeat_interleave(2, dim=1) if neighbours else torch.cat([angles, angles], dim=1)
    return both[:, None, None]


def add_vision(chunk: SeesImages, settings: VisionSettings, *, sequence_parallel: bool) -> None:
    """Let a chunk see images. Raises ValueError if the layers that need further features are not
    all in the first chunk."""
    chunk.vision_settings = settings
    chunk.decoder.register_forward_pre_hook(_AnglesHook(chunk.angles_of_images), with_kwargs=True)
    numbers = [layer.layer_number for layer in chunk.decoder.layers]
    if not chunk.pre_process:
        if numbers and min(numbers) <= settings.deepstack_layers:
            raise ValueError(
                f"--multimodal-keys: images of this model also enter the outputs of its first "
                f"{settings.deepstack_layers} layers, which have to be in the first pipeline "
                "stage; give it more layers"
            )
        return
    chunk.vision = ImageTower(settings)
    if settings.trained and chunk.config.recompute_granularity == "full":
        chunk.vision.recompute_layers()
    for parameter in chunk.vision.parameters():
        # each rank has the features of some rows; megatron-core sums these gradients
        parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        setattr(parameter, TOWER_PARAMETER, True)
    for layer in chunk.decoder.layers:
        if layer.layer_number <= settings.deepstack_layers:
            layer.register_forward_hook(_DeepstackHook(layer.layer_number - 1), with_kwargs=True)


class _AnglesHook:
    """Replaces the rotary angles that the model gives to its layers. angles_of_images: see
    `SeesImages`."""

    def __init__(self, angles_of_images: Callable[[PackedRows], Tensor | None]) -> None:
        self.angles_of_images = angles_of_images

    def __call__(
        self, module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        angles = self.angles_of_images(keywords["packed_seq_params"])
        return None if angles is None else (arguments, {**keywords, "rotary_pos_emb": angles})


class _DeepstackHook:
    """Adds further features to the output of a layer, at the rows of images. number: its own, from
    0."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(
        self,
        module: torch.nn.Module,
        arguments: object,
        keywords: Mapping[str, Any],
        output: tuple[Tensor, object],
    ) -> tuple[Tensor, object] | None:
        seen: ImagePass | None = keywords["packed_seq_params"].images
        if seen is None:
            return None
        features = seen.deepstack[self.number].unsqueeze(1)
        return output[0].index_add(0, seen.images.rows, features), output[1]
