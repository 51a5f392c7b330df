"""Rows of later tokens of the same sequence, for multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.megatron.ops.context_parallel import places_over_ranks, rows_of_rank


@dataclass(frozen=True, slots=True)
class AheadRows:
    """For each row of this rank the row of a later token."""

    within: Tensor  # [T / cp] bool, whether its sequence has one
    # [T / cp] int64, its place in the rows of all context-parallel ranks, one rank after the other;
    # 0 if there is none
    source: Tensor


def ahead_rows(cu_seqlens: Tensor, steps: int, cp_size: int, cp_rank: int) -> AheadRows:
    """The rows of the tokens that follow after `steps` tokens. cu_seqlens: [S + 1] of the full
    sequences; a table on the host is made without the device."""
    bounds = cu_seqlens.long()
    ends = bounds[1:].repeat_interleave(bounds.diff())
    rows = torch.arange(int(bounds[-1]), device=cu_seqlens.device)
    if cp_size > 1:
        rows = rows_of_rank(cu_seqlens, cp_size, cp_rank)
    within = rows + steps < ends[rows]
    source = torch.where(within, rows + steps, 0)
    if cp_size > 1:
        source = places_over_ranks(cu_seqlens, cp_size)[source]
    return AheadRows(within, source)
