"""SwiGLU whose two factors are clamped, with bounds that differ by layer (Step-3.5): with a bound b
an MLP or an expert computes min(silu(gate), b) * clamp(up, -b, b). megatron-core has one clamp for
all layers, which is of the gate before its activation."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def clamped_swiglu(gate_and_up: Tensor, *, bound: float) -> Tensor:
    """[..., 2 n] -> [..., n]."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)


class ClampedActivation:
    """Mixed into megatron-core's MLP, or a kind of it: to `forward` it is one without a gate, whose
    activation takes both halves, and to checkpoints one with a gate."""

    config: Any
    activation_func: Any
    gated_config: Any

    def sharded_state_dict(self, *args: Any, **settings: Any) -> Any:
        """As in megatron-core."""
        own = self.config
        self.config = self.gated_config
        try:
            return super().sharded_state_dict(*args, **settings)  # type: ignore[misc]
        finally:
            self.config = own


@functools.cache
def _clamped(kind: type) -> type:
    return type(f"Clamped{kind.__name__}", (ClampedActivation, kind), {})


def _clamp(mlp: Any, bound: float) -> None:
    config = mlp.config
    mlp.gated_config = config
    mlp.config = copy.copy(config)
    mlp.activation_func = partial(clamped_swiglu, bound=bound)
    mlp.config.activation_func = mlp.activation_func
    mlp.config.gated_linear_unit = False
    mlp.config.bias_activation_fusion = False
    mlp.__class__ = _clamped(type(mlp))  # type: ignore[arg-type]


def _experts(layer: MoELayer) -> list[torch.nn.Module]:
    """The modules that compute the activations of experts: each one, or all in one."""
    return list(getattr(layer.experts, "local_experts", [layer.experts]))


def clamp_activations(chunk: LanguageModule) -> None:
    """Clamp the activations of a chunk by the bounds of its config."""
    bounds = (chunk.config.expert_clamps, chunk.config.mlp_clamps)
    for layer in chunk.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        of_experts, of_mlp = (by_layer and by_layer[layer.layer_number - 1] for by_layer in bounds)
        mlp: Any = layer.mlp
        has_experts = isinstance(mlp, MoELayer)
        if of_experts and has_experts:
            for expert in _experts(mlp):
                _clamp(expert, of_experts)
        if of_mlp:
            _clamp(mlp.shared_experts if has_experts else mlp, of_mlp)
