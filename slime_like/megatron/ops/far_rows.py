"""Rows of the far queries and the keys of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FarRows:
    """Rows of the F far queries of a rank and of all T keys, int64.

    Args:
    """

    queries: Tensor  # [F], of this rank's rows
    places: Tensor  # [F], position of each far query within its sequence
    key_places: Tensor  # [T], the same of all natural rows
    # [P, n], natural rows of the complete pools of n keys, sequence after sequence; None without
    # pools (ops/sparse_attention.py)
    pools: Tensor | None
