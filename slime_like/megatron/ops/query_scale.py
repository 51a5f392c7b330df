"""Queries scaled by their position, for contexts longer than the model was trained on (Llama 4's
temperature tuning, in Ministral 3): 1 + beta log(1 + floor(position / length))."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import own_rows


def query_scale(
    rows: PackedRows, config: TransformerConfig, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    """[T] float32, of this context-parallel rank's rows; 1 for positions below
    `config.query_scale_length`."""
    positions = torch.cat([torch.arange(length) for length in rows.lengths])
    if cp_size > 1:
        positions = own_rows(positions, rows.cu_seqlens_q, cp_size, cp_rank)
    steps = torch.floor(positions / config.query_scale_length)
    return 1 + config.query_scale_beta * torch.log1p(steps)


def scale_queries(chunk: torch.nn.Module) -> None:
    """Make every core attention of a model chunk scale its queries."""
    for name, module in chunk.named_modules():
        if name.endswith(".core_attention"):
            module.register_forward_pre_hook(_scaled, with_kwargs=True)


def _scaled(
    module: torch.nn.Module, inputs: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """query: [T, heads, d], the first of the inputs."""
    query, *others = inputs
    rows: PackedRows = more["packed_seq_params"]
    if rows.query_scale is None:  # shared by all layers
        rows.query_scale = query_scale(rows, module.config).to(query.device)
    return (query * rows.query_scale.to(query.dtype)[:, None, None], *others), more
