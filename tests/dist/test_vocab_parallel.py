"""Log-prob, entropy and gradient of a vocabulary in 2 and 4 parts, against one rank, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks
from tests.dist.backend_worker import parallel, vocab_differences


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_equal_the_whole(tmp_path: Path, ranks: int) -> None:
    for worst in run_ranks(
        "tests.dist.backend_worker:vocab_differences_on_all", ranks, tmp_path, {}, timeout_s=120
    ):
        assert max(worst) < 1e-12


def test_one_rank_is_the_whole() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with parallel() as layout:
            assert vocab_differences(layout) == [0.0, 0.0, 0.0]
    finally:
        dist.destroy_process_group()
