"""Experts beside a dense MLP (Gemma 4 26B-A4B): both work on the hidden state, each behind a norm
of its own, and their outputs are normalised one by one and added. In megatron-core's terms the MLP
is a shared expert; what is in front of the router is its own (ops/router.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.norms import RMSNorm

NORMS = ("shared_input", "shared_output", "routed_input", "routed_output")


class ExpertsBesideMLP(MoELayer):
    """megatron-core's MoELayer, whose input is not normalised."""

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        self.expert_norms = torch.nn.ModuleDict({name: RMSNorm(config) for name in NORMS})

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """The output of the MLP, normalised."""
        out = super().shared_experts_compute(self.expert_norms["shared_input"](hidden_states))
        normed: Tensor = self.expert_norms["shared_output"](out)
        return normed

    def preprocess(self, hidden_states: Tensor, *routing: Any) -> Any:
        """As in megatron-core, of the normalised input."""
        return super().preprocess(self.expert_norms["routed_input"](hidden_states), *routing)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        """The sum of both outputs."""
        routed = super().postprocess(output, None)
        total: Tensor = self.expert_norms["routed_output"](routed) + shared_expert_output
        return total


def put_beside_mlp(layer: ModuleSpec) -> None:
    """Replace the experts of a layer spec, and the norm in front of them."""
    parts = layer.submodules
    parts.pre_mlp_layernorm = IdentityOp
    if isinstance(parts.mlp, partial):  # since megatron-core 0.18
        parts.mlp = partial(ExpertsBesideMLP, *parts.mlp.args, **parts.mlp.keywords)
    else:
        parts.mlp.module = ExpertsBesideMLP
