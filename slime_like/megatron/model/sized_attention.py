"""Attention whose heads differ by layer (MiMo-V2-Flash, Gemma 4, Step-3.5); see
weights/attention_sizes.py for what may differ. Values may be scaled, or normalised by head without
a weight. A layer may attend to the keys and values of another one, which are lent before they are
rotated. A head may have a gate, whose row of the projection follows the queries of its group: its
output is multiplied by the sigmoid of that number."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.ops.attention import PackedAttention
from slime_like.megatron.ops.side_tensors import SideTensor, borrow, lend
from slime_like.weights.attention_sizes import AttentionSizes, layers_of


class SizedAttention(SelfAttention):
    """megatron-core's SelfAttention with the sizes of its layer. config: a SizedConfig; the layer
    has a copy with its own numbers. Tensor-parallel ranks have whole groups."""

    core_attention: torch.nn.Module

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **settings: Any,
    ) -> None:
        sizes = layers_of(config)[layer_number - 1]
        own = _config_of_layer(config, sizes)
        super().__init__(own, submodules, layer_number, **settings)
        self.sizes = sizes
        if sizes.width != self.linear_qkv_out_dim:
            self._project_other_widths(submodules)
        core: torch.nn.Module = self.core_attention
        if sizes.value_dim != sizes.head_dim and not isinstance(core, PackedAttention):
            # Transformer Engine's is made for one size
            self.core_attention = type(core)(
                config=own,
                layer_number=layer_number,
                attn_mask_type=self.attn_mask_type,
                attention_type=self.attention_type,
                cp_comm_type=settings.get("cp_comm_type"),
                softmax_scale=own.softmax_scale,
                k_channels=sizes.head_dim,
                v_channels=sizes.value_dim,
                pg_collection=self.pg_collection,
            )
        self.val_hidden_size = sizes.value_dim
        if sizes.reads_keys:
            self.k_layernorm = None
        kind = "windows" if sizes.windowed else "all"
        self.lent = tuple(f"{what} of {kind}" for what in ("keys", "values"))
        self.sides: dict[str, SideTensor] = {}  # of the pass

    def _project_other_widths(self, submodules: SelfAttentionSubmodules) -> None:
        """Replace the projections, which megatron-core makes for heads of one size."""
        config = self.config
        linear: dict[str, object] = dict(
            config=config, is_expert=False, tp_group=self.pg_collection.tp
        )
        self.linear_qkv_out_dim = self.sizes.width
        self.linear_qkv = submodules.linear_qkv(
            config.hidden_size,
            self.sizes.width,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        if self.sizes.output == self.query_projection_size:
            return
        self.linear_proj = submodules.linear_proj(
            self.sizes.output,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )

    def forward(self, *args: Any, **settings: Any) -> tuple[Tensor, Tensor | None]:
        """As in megatron-core."""
        if self.sizes.reads_keys or self.sizes.lends_keys:
            self.sides = settings["packed_seq_params"].sides
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(*args, **settings)
        finally:
            self.sides = {}
        return output

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, ...]:
        """[T, 1, hidden] -> queries [T, 1, heads / tp, d], keys [T, 1, groups / tp, d], values
        [T, 1, groups / tp, dv], and, if the heads have gates, these before the sigmoid [T, 1,
        heads / tp]."""
        mixed, _bias = self.linear_qkv(hidden_states)
        sizes = self.sizes
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        queries = sizes.heads // sizes.groups * sizes.head_dim
        query = grouped[..., :queries].unflatten(-1, (-1, sizes.head_dim)).flatten(2, 3)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if sizes.reads_keys:
            key, value = (borrow(hidden_states, self.sides[name]) for name in self.lent)
            return query, key, value
        first = queries + sizes.gated * (sizes.heads // sizes.groups)
        key = grouped[..., first : first + sizes.head_dim]
        value = grouped[..., -sizes.value_dim :]  # the key, where there is no other
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        if sizes.gated:
            gate = grouped[..., queries : queries + sizes.heads // sizes.groups].flatten(2)
            return query, key, value, gate
        if self.config.value_norm:
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            value = F.rms_norm(wide, wide.shape[-1:], eps=self.config.layernorm_epsilon)
            value = value.to(key.dtype)
        if self.config.value_scale != 1.0:
            value = value * self.config.value_scale
        if sizes.lends_keys:
            key = lend(key, key, self.sides, self.lent[0])
            value = lend(value, value, self.sides, self.lent[1])
        return query, key, value

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: the output of the heads [T, 1, heads / tp * dv]."""
        heads = x.unflatten(-1, (gate.size(-1), -1))
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (heads * gate.to(dtype).sigmoid().unsqueeze(-1)).to(x.dtype).flatten(-2)


def _config_of_layer(config: TransformerConfig, sizes: AttentionSizes) -> TransformerConfig:
    own = copy.copy(config)
    own.num_attention_heads = sizes.heads
    own.num_query_groups = sizes.groups
    own.kv_channels = sizes.head_dim
    own.attention_output_gate = sizes.gated
    if not sizes.sinks:
        own.softmax_type = "vanilla"
    return own
