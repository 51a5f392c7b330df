"""Kimi delta attention (arXiv 2510.26692, section 3), a delta net with a decay per channel of the
key, and latent attention without rotary embedding, which such models have in their other layers.

A group is one head. Its decays and its output gates are projections of low rank: hidden -> head
dimension, on every tensor-parallel rank, and from there to the heads of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.model.delta_net import SHARDED, DeltaNet
from slime_like.megatron.ops.delta_rule import DeltaRows


class UnrotatedLatentAttention(MLASelfAttention):
    """megatron-core's MLA without rotary embedding: all angles are 0, whose rotation is exact."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.rotary_pos_emb.inv_freq.zero_()


class KimiDeltaNet(DeltaNet):
    """Kimi delta attention. The input projection yields query, key, value and rate per head.

    low_rank_weight: [2 * head dimension, hidden], of the decays and of the output gates.
    decay_weight, gate_weight: [heads * head dimension, head dimension], the second factors.
    """

    per_channel = True

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        # each rank has the gradient of its own rows' products
        self.low_rank_weight.sequence_parallel = config.sequence_parallel

    def _projected(self) -> int:
        return self.channels + 1

    def sharded(self) -> tuple[str, ...]:
        """See `DeltaNet.sharded`."""
        return (*SHARDED, "decay_weight", "gate_weight")

    def _make_parameters(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        yield from super()._make_parameters(device)
        config = self.config
        like = {"dtype": config.params_dtype, "device": device}
        low = torch.empty(2 * self.key_dim, config.hidden_size, **like)
        decay = torch.empty(self.groups * self.decays, self.key_dim, **like)
        gate = torch.empty(self.groups * self.values, self.key_dim, **like)
        if config.perform_initialization:
            config.init_method(low)
            with get_cuda_rng_tracker().fork():
                config.init_method(decay)
                config.init_method(gate)
        yield "low_rank_weight", low
        yield "decay_weight", decay
        yield "gate_weight", gate

    def project(self, hidden_states: Tensor) -> Tensor:
        """See `DeltaNet.project`. Per head: query, key, value, rate, decays and gates."""
        mixed, _bias = self.in_proj(hidden_states)
        low = F.linear(hidden_states, self.low_rank_weight)
        # backward sums the gradients of the ranks' heads
        if self.config.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        for_decay, for_gate = low.chunk(2, -1)
        parts = (
            mixed,
            F.linear(for_decay, self.decay_weight),
            F.linear(for_gate, self.gate_weight),
        )
        return torch.cat([x.squeeze(1).unflatten(1, (self.groups, -1)) for x in parts], -1)

    def mix(self, x: Tensor, rows: DeltaRows, first: int) -> Tensor:
        """See `DeltaNet.mix`."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        mixed, rate, decay, gate = x.split([self.channels, 1, self.decays, self.values], -1)
        query, key, value = self._convolved(mixed, rows, first)
        log_decay = self._log_decay(decay.to(dtype), first)
        rates = rate.squeeze(-1).to(dtype).sigmoid()
        out = self._delta_rule(query, key, value, log_decay, rates, rows)
        normed = F.rms_norm(out.to(dtype), out.shape[-1:], eps=self.config.layernorm_epsilon)
        return (self._norm_weight().to(dtype) * normed * gate.to(dtype).sigmoid()).to(x.dtype)

    def _log_decay(self, x: Tensor, first: int) -> Tensor:
        """Logarithms of the decays: -exp(A) softplus(x + dt), or with a lower bound L, which is
        negative, L sigmoid(exp(A) (x + dt)), as GLM-5.3 has it. x: [T, G, key_dim], the G heads
        from index `first`."""
        heads = slice(first, first + x.size(1))
        rate = self.A_log[heads].to(x.dtype).exp().unsqueeze(-1)
        x = x + self.dt_bias.view(-1, self.key_dim)[heads].to(x.dtype)
        bound = self.config.linear_decay_bound
        if bound is None:
            return -rate * F.softplus(x)
        return bound * torch.sigmoid(rate * x)
