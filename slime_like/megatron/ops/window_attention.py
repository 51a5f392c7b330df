"""Packed attention with sliding windows and learnable attention sinks (gpt-oss).

A window of w tokens is megatron-core's `window_size` (w - 1, 0): a query attends to itself and the
w - 1 tokens before it. `window_attn_skip_freq` selects the layers. A sink (`softmax_type`
"learnable") is an additional score per head in the softmax denominator. It is implemented as an
additional key with value zero that every query attends to, so the kernels of plain attention apply.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from slime_like.megatron.ops.attention import PackedAttention


class WindowAttention(PackedAttention):
    """`PackedAttention` with windows and sinks. softmax_offset: sinks of this rank's heads
    [heads / tp], named as in megatron-core and Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **settings: Any,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, **settings)
        groups = settings.get("pg_collection")
        self.tp_group = None if groups is None else groups.tp
        size = config.window_size
        layers = config.window_attn_skip_freq
        if size is not None and is_layer_window_attention(size, layers, layer_number):
            self.before = size[0]
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention with window and sinks. mask: None (causal), a CausalBias for queries that are
        the last of the keys' positions, or a bool mask in which each query attends to a prefix of
        the keys."""
        by_position = mask is None or isinstance(mask, CausalBias)
        queries = query.size(1)
        keys = key.size(1)
        if by_position and self.before is not None and keys - queries > self.before:
            skipped = keys - queries - self.before  # keys that no query attends to
            key = key[:, skipped:]
            value = value[:, skipped:]
            keys = keys - skipped
            mask = causal_lower_right(queries, keys)
        within = self.before is None or keys <= self.before + 1
        if by_position and within and self.softmax_offset is None:
            return super()._sdpa(query, key, value, mask)
        if by_position:
            causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
            mask = causal.tril(keys - queries)
        assert mask is not None
        if self.before is not None:
            last = mask.sum(-1, keepdim=True) - 1
            mask = mask & (torch.arange(keys, device=query.device) >= last - self.before)
        if self.softmax_offset is None:
            return super()._sdpa(query, key, value, mask)
        return self._with_sinks(query, key, value, mask, self.softmax_offset)

    def _with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
    ) -> Tensor:
        # Heads that share keys have different sinks. The sink score is therefore an additional
        # dimension of the query, in which the sink's key is 1 and all other keys are 0.
        scores = (sinks / self.softmax_scale).to(query.dtype)
        query = torch.cat([query, scores.expand(query.shape[:-1]).unsqueeze(-1)], dim=-1)
        # the sink becomes the first key; values get the dimension too, for kernels that need
        # equal sizes
        key, value = (F.pad(x, (0, 1, 0, 0, 1, 0)) for x in (key, value))
        key[:, 0, :, -1] = 1.0
        out = super()._sdpa(query, key, value, F.pad(mask, (1, 0), value=True))
        return out[..., :-1]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """The sinks, sharded over heads."""
        if self.softmax_offset is None:
            return {}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state
