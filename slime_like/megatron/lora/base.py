"""The frozen base model, and the hooks through which the active adapter is applied.

The model's modules keep their names in checkpoints and conversions: an adapter is applied by a
forward hook on a linear layer, in `PolicyModel.head_weight` for the output layer, and in
`HeadWeight` for a critic's value head. Without an active adapter this is the base model, e.g. the
reference model of a KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.hf.model import HfModel
from arguments.schema import GPTModelConfig
from slime_like.megatron.lora.targets import HEAD
from slime_like.megatron.model.policy import AdapterSlot
from slime_like.megatron.network import Network
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.weights.parameter_map import family_map, global_parameters, model_sizes, unwrap

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig


VALUE_HEAD = "value_head"  # name of its slot
LATENT = (
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
)
DELTA = ("in_proj", "out_proj")
LINEAR = ("linear_qkv", *LATENT, *DELTA, "linear_proj", "linear_fc1", "linear_fc2")


class LoraBase(Network):
    """A frozen network on which adapters can be made active, one at a time."""

    def __init__(
        self,
        transformer: TransformerConfig,
        gpt: GPTModelConfig,
        transformer_impl: str,
        layout: ParallelLayout,
        *,
        hf: HfModel,
    ) -> None:
        super().__init__(transformer, gpt, transformer_impl, layout)
        self.freeze()
        self.hf = hf
        self.sizes = model_sizes(self.config, gpt)
        self.tied = not gpt.untie_embeddings_and_output_weights
        self.family = family_map(hf.architecture, self.config, tied=self.tied)
        self.slots: list[dict[str, AdapterSlot]] = [
            _slots(chunk, has_head=self.has_head(index)) for index, chunk in enumerate(self.chunks)
        ]
        self._carry_gradients = False
        if layout.is_first_stage:
            unwrap(self.chunks[0]).embedding.register_forward_hook(self._begin_graph)

    def has_head(self, index: int) -> bool:
        """Whether a chunk of this rank ends with the output layer."""
        return self.layout.is_last_stage and index == self.layout.vp_size - 1

    @contextmanager
    def active(self, layers: Sequence[Mapping[str, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
        """Make an adapter active within the block. layers: per chunk, by the canonical name of the
        weight; a value head by `VALUE_HEAD`."""
        for slots in self.slots:
            assert not any(slot.active for slot in slots.values()), "another adapter is active"
        for slots, chunk_layers in zip(self.slots, layers, strict=True):
            for name, layer in chunk_layers.items():
                slots[name].active = layer
        # recomputation and pipeline schedules only run backward through inputs that require a
        # gradient
        self._carry_gradients = (
            self.config.recompute_granularity is not None or self.layout.pp_size > 1
        )
        try:
            yield
        finally:
            self._carry_gradients = False
            for slots in self.slots:
                for slot in slots.values():
                    slot.active = None

    def _begin_graph(self, module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        if self._carry_gradients and torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()


def _slots(chunk: MegatronModule, *, has_head: bool) -> dict[str, AdapterSlot]:
    """Add a hook to every linear layer of a chunk. Returns a slot for each, by the canonical name
    of its weight."""
    names = {id(parameter): name for name, parameter in global_parameters([chunk])}
    slots: dict[str, AdapterSlot] = {}
    for module in unwrap(chunk).decoder.modules():
        # one weight, or one for each expert of Transformer Engine's grouped linear layers
        weights = [p for key, p in module._parameters.items() if key.startswith("weight")]
        linear = [names[id(p)] for p in weights if p is not None and _is_linear(names[id(p)])]
        if not linear:
            continue
        of_layer = {name: AdapterSlot() for name in linear}
        slots |= of_layer
        hook = _Hook(*of_layer.values()) if len(linear) == 1 else _GroupedHook(of_layer.values())
        # before other hooks (megatron_patches/mla_tp_grads.py), which must get the output including
        # the adapter
        module.register_forward_hook(hook, prepend=True)
    if has_head:
        slots[HEAD] = unwrap(chunk).head_slot
        slots[VALUE_HEAD] = unwrap(chunk).output_layer.value_slot
    return slots


def _is_linear(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in LINEAR


class _Hook:
    def __init__(self, slot: AdapterSlot) -> None:
        self.slot = slot

    def __call__(
        self,
        module: torch.nn.Module,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Tensor | None],
    ) -> object:
        if self.slot.active is None:
            return None
        return output[0] + self.slot.active(_input_of_product(module, inputs[0])), output[1]


class _GroupedHook:
    """For a layer of Transformer Engine with a weight for each expert. slots: in their order."""

    def __init__(self, slots: Iterable[AdapterSlot]) -> None:
        self.slots = tuple(slots)

    def __call__(
        self,
        module: torch.nn.Module,
        inputs: tuple[Tensor, Tensor | Sequence[int]],
        output: tuple[Tensor, object],
    ) -> object:
        active = [slot.active for slot in self.slots]
        if not any(active):
            return None
        x, counts = inputs  # tokens of the first expert, of the second, ...
        sizes = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        outputs = [
            parts.new_zeros(parts.size(0), output[0].size(-1)) if layer is None else layer(parts)
            for layer, parts in zip(active, x.split(sizes), strict=True)
        ]
        return output[0] + torch.cat(outputs), output[1]


def _input_of_product(layer: Any, x: Tensor) -> Tensor:
    """What the layer multiplies by its weight: x, or its norm where Transformer Engine has fused
    the norm into the layer, whose output it does not return. It is computed once more then."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    scale: Tensor = 1 + weight if layer.zero_centered_gamma else weight
    if layer.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], scale, layer.eps)
    return F.layer_norm(x, x.shape[-1:], scale, layer.layer_norm_bias, layer.eps)
