"""Which rows of packed sequences are one answer of the model."""

from __future__ import annotations

from slime_like.lazy import Tensor


def turns_of(mask: Tensor, seq_ids: Tensor) -> tuple[Tensor, int]:
    """The answers of a model among the rows of whole sequences: active tokens in a row.

    Args:
        mask: [T] bool, active tokens.
        seq_ids: [T], ascending.

    Returns:
        The answer of each row [T] int64, of an inactive one any; and how many there are, at least 1.
    """
    begins = mask.clone()
    begins[1:] &= ~(mask[:-1] & (seq_ids[1:] == seq_ids[:-1]))
    ids = (begins.cumsum(0) - 1).clamp(min=0)
    return ids, int(ids[-1]) + 1 if ids.numel() else 1
