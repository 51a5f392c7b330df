"""Turns of an episode: runs of consecutive active tokens."""

from __future__ import annotations

from slime_like.lazy import Tensor


def turns_of(mask: Tensor, seq_ids: Tensor) -> Tensor:
    """Number the turns, i.e. runs of consecutive active tokens, in complete sequences.

    Args:
        mask: [T] bool, active tokens.
        seq_ids: [T], ascending.

    Returns:
        The turn of each row, [T] int64, ascending from 0; arbitrary at inactive rows.
    """
    begins = mask.clone()
    begins[1:] &= ~(mask[:-1] & (seq_ids[1:] == seq_ids[:-1]))
    return (begins.cumsum(0) - 1).clamp(min=0)
