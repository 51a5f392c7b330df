"""Index tables of packed rows that only some networks read. They follow from the lengths of the
sequences, which the host knows when it packs them: made there, they cost no wait for the device."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from slime_like.megatron.ops.ahead import ahead_rows
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.delta_rule import delta_rows
from slime_like.megatron.ops.query_scale import query_scale
from slime_like.megatron.ops.sparse_attention import far_rows


def prepare_rows(
    rows: PackedRows,
    config: TransformerConfig,
    *,
    cp_size: int,
    cp_rank: int,
    prediction_layers: int = 0,
) -> None:
    """Add the tables that a network reads, in place.

    Args:
        rows: On the host.
        prediction_layers: Number of multi-token prediction layers that this pass runs.
    """
    if config.linear_attention_freq:
        rows.delta = delta_rows(rows.cu_seqlens_q, rows.lengths)
    if topk := getattr(config, "index_topk", None):
        rows.far = far_rows(rows, topk)
    if getattr(config, "query_scale_beta", 0.0):
        rows.query_scale = query_scale(rows, config, cp_size, cp_rank)
    rows.ahead = tuple(
        ahead_rows(rows.cu_seqlens_q, number + 1, cp_size, cp_rank)
        for number in range(prediction_layers)
    )
