"""The lean head on 2 and 4 tensor-parallel ranks, with and without sequence parallelism, against
one rank, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_equal_the_whole(tmp_path: Path, ranks: int) -> None:
    """Values and gradients, with all rows, some of them, and none: every rank runs backward."""
    for found in run_ranks(
        "tests.dist.lean_head_worker:differences_on_all", ranks, tmp_path, {}, timeout_s=120
    ):
        assert len(found) == 20
        assert {case: worst for case, worst in found.items() if max(worst) > 1e-12} == {}
