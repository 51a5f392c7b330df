"""Index tables of packed rows that only some networks read. They follow from the lengths of the
sequences, which the host knows when it packs them: made there, they cost no wait for the device."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.compressed_attention import entry_tables, frequencies
from slime_like.megatron.ops.delta_rule import CHANNEL_CHUNK, CHUNK, DeltaRows, delta_rows
from slime_like.megatron.ops.entries import EntryTables
from slime_like.megatron.ops.image_blocks import image_blocks
from slime_like.megatron.ops.sparse_attention import far_rows


def prepare_rows(
    rows: PackedRows,
    config: TransformerConfig,
    *,
    last_visible: Tensor | None = None,
) -> None:
    """Add the tables that a network reads, in place.

    Args:
        rows: On the host.
        last_visible: See `ImageRows`.
    """
    if config.linear_attention_freq:
        rows.delta = delta_tables(rows, config)
    if topk := getattr(config, "index_topk", None):
        rows.far = far_rows(rows, topk, config.index_pool)
    if hasattr(config, "entry_rates"):
        rows.entries = compressed_tables(rows, config)
    if last_visible is not None:
        rows.blocks = image_blocks(last_visible, rows.lengths, rows.context)


def delta_tables(rows: PackedRows, config: TransformerConfig) -> DeltaRows:
    """The chunks of a network's delta nets."""
    per_channel = getattr(config, "linear_decay_per_channel", False)
    chunk = CHANNEL_CHUNK if per_channel else CHUNK
    return delta_rows(rows.cu_seqlens_q, rows.lengths, chunk)


def compressed_tables(rows: PackedRows, config: TransformerConfig) -> EntryTables:
    """The entries and the rotary embeddings of a network's compressed attentions."""
    rates = sorted({rate for rate in config.entry_rates if rate})
    positions = torch.arange(max(rows.lengths), dtype=torch.float32)
    angles = (
        torch.outer(positions, frequencies(config.rotary_width, config.window_rotary_base, None)),
        torch.outer(
            positions,
            frequencies(config.rotary_width, config.entry_rotary_base, config.entry_yarn),
        ),
    )
    tables = dataclasses.replace(entry_tables(rows, rates), angles=angles)
    return tables.on(rows.cu_seqlens_q.device)
