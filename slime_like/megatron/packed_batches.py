"""Micro-batches of packed rows: the share of a context-parallel rank, and the rows of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime_like.images.rows import ImagePass, select_rows
from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import rows_of_rank
from slime_like.types import MicroBatch

if TYPE_CHECKING:
    from slime_like.types import MicroBatch


def rows_of_context_rank(batch: MicroBatch, cp_size: int, cp_rank: int) -> MicroBatch:
    """Select the rows of one context-parallel rank from a full micro-batch."""
    rows = rows_of_rank(batch.cu_seqlens, cp_size, cp_rank)
    selected: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor) and f.name != "cu_seqlens":
            by_row = value[0] if value.size(0) == 1 else value
            assert by_row.size(0) == batch.seq_ids.numel(), f"{f.name} is not by row"
            selected[f.name] = by_row[rows] if by_row is value else by_row[rows].unsqueeze(0)
    images = batch.images
    if images is not None:
        selected["images"] = select_rows(images, rows, batch.seq_ids.numel())
    return replace(batch, **selected)


def join_context_ranks(values: Tensor, batches: Sequence[MicroBatch]) -> Tensor:
    """Reorder the values of all ranks' rows to natural order: [n, T], T rows over all `batches`.

    values: [cp_size, n, T / cp_size], each rank's rows with the micro-batches concatenated.
    """
    parts = values.split([batch.tokens.numel() for batch in batches], dim=2)
    ordered = []
    for part, batch in zip(parts, batches):
        assert batch.packed is not None and batch.packed.context is not None
        ordered.append(part.transpose(0, 1).flatten(1)[:, batch.packed.context.natural])
    return torch.cat(ordered, dim=1)


def rows_of_pass(batch: MicroBatch) -> PackedRows:
    """The packed rows of a micro-batch for one pass through a model chunk, whose layers share what
    they select or lend and what its images add to their outputs."""
    assert batch.packed is not None, "packed by slime_like.megatron.packing.pack_all"
    images = None if batch.images is None else ImagePass(batch.images)
    return replace(batch.packed, selected_keys={}, compared_keys=set(), sides={}, images=images)


def images_of_sequence_rank(batch: MicroBatch, tp_size: int, tp_rank: int) -> MicroBatch:
    """Leave the images only the rows of one rank of sequence parallelism."""
    if batch.images is None:
        return batch
    total = batch.tokens.numel()
    kept = torch.arange(total * tp_rank // tp_size, total * (tp_rank + 1) // tp_size)
    return replace(batch, images=select_rows(batch.images, kept, total))
