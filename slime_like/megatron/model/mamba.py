"""Mamba-2 (arXiv 2405.21060, section 7) in place of attention, and networks whose layers are single
blocks: a mixer or an MLP, not both, as Nemotron-H has them (arXiv 2504.03624).

What enters the state space model is projected per group (the heads that share B and C), as for
delta nets: C, B and x are their queries, keys and values. So tensor-parallel ranks have whole
groups, and context-parallel ranks exchange groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.delta_net import SHARDED, DeltaNet
from slime_like.megatron.model.layer_specs import layers_of_chunk
from slime_like.megatron.ops.delta_rule import DeltaRows
from slime_like.megatron.ops.state_space import state_space

STEPS = (1e-3, 1e-1)  # bounds of step sizes at initialisation


class Mamba2(DeltaNet):
    """Mamba-2 with a gated norm of each group. The input projection yields gates, C, B, x and step
    sizes per group.

    conv_bias: [groups * channels]. D: [heads], of the skip term. norm_weight: [groups * values].
    """

    has_kernels = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the input projection per group, by what they are."""
        return self.values, self.channels, self.heads

    def _projected(self) -> int:
        return sum(self.widths)

    def sharded(self) -> tuple[str, ...]:
        """See `DeltaNet.sharded`."""
        return (*SHARDED, "conv_bias", "D", "norm_weight")

    def _make_parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Step sizes are log-uniform in `STEPS` at initialisation."""
        made = dict(super()._make_parameters(device))
        like = {"dtype": self.config.params_dtype, "device": device}
        bias = torch.empty(self.groups * self.channels, **like)
        if self.config.perform_initialization:
            bound = self.config.linear_conv_kernel_dim**-0.5
            low, high = map(math.log, STEPS)
            with get_cuda_rng_tracker().fork():
                bias.uniform_(-bound, bound)
                step = made["dt_bias"].uniform_(low, high).exp()
            made["dt_bias"] = step + (-torch.expm1(-step)).log()  # the inverse of softplus
        made["norm_weight"] = torch.ones(self.groups * self.values, **like)
        yield from made.items()
        yield "conv_bias", bias
        yield "D", torch.ones(self.groups * self.heads, **like)

    def mix(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """See `DeltaNet.mix`."""
        size = x.size(1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        heads = slice(first * self.heads, (first + size) * self.heads)
        gate, mixed, raw = x.split(self.widths, -1)
        read, write, value = self._convolved(mixed, rows, first, self.conv_bias)
        step = F.softplus(raw.flatten(1).to(dtype) + self.dt_bias[heads].to(dtype))
        step = step.clamp(min=self.config.mamba_smallest_step)
        log_decay = -self.A_log[heads].to(dtype).exp() * step
        out = state_space(read, write, value, step, log_decay, rows)
        out = out + self.D[heads].to(dtype).unsqueeze(-1) * value.to(dtype)
        gated = out.unflatten(1, (size, -1)).flatten(2) * F.silu(gate.to(dtype))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.config.layernorm_epsilon)
        weight = self.norm_weight.view(-1, self.values)[first : first + size]
        return (weight.to(dtype) * normed).to(x.dtype)


def keep_single_blocks(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> None:
    """Leave in each layer of a model chunk what its letter in `block_pattern` says: a mixer ("M" or
    "*"), or an MLP ("-" or "E")."""
    numbers = layers_of_chunk(config, vp_stage)
    for index, (number, layer) in enumerate(zip(numbers, block.layer_specs, strict=True)):
        if config.block_pattern[number] in "M*":
            absent = dict(pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        else:
            absent = dict(
                input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
            )
        block.layer_specs[index] = replace(layer, submodules=replace(layer.submodules, **absent))
