"""Rows of the far queries and the keys of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FarRows:
    """Rows of the F far queries of a rank and of all T keys, int64.

    Args:
        queries: [F], of this rank's rows.
        places: [F], position of each far query within its sequence.
        key_places: [T], the same of all natural rows.
    """

    queries: Tensor
    places: Tensor
    key_places: Tensor
