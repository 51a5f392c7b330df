"""benchmarks/parity/ranks.py: results, tracebacks, and no process left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.ranks import run_ranks


def add_ranks(rank: int, world_size: int, arguments: dict[str, Any]) -> float:
    total = torch.tensor(rank + arguments["offset"])
    dist.all_reduce(total)
    return total.item()


def one_fails(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    Path(arguments["pids"], str(os.getpid())).touch()
    dist.barrier()  # both have started
    if rank == 1:
        raise ZeroDivisionError("rank 1 gave up")
    dist.barrier()


def never_ends(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    Path(arguments["pids"], str(os.getpid())).touch()
    time.sleep(1000)


def test_results_of_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(
        "tests.dist.test_ranks:add_ranks", 3, tmp_path, {"offset": 0.5}, timeout_s=250
    ) == [4.5, 4.5, 4.5]


@pytest.mark.parametrize(
    ("function", "words", "limit_s"),
    [
        ("one_fails", "ZeroDivisionError: rank 1 gave up", 250),
        ("never_ends", "no result within", 5),
    ],
)
def test_failures_are_reported_and_all_processes_end(
    tmp_path: Path, function: str, words: str, limit_s: float
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(AssertionError, match=words):
        run_ranks(
            f"tests.dist.test_ranks:{function}",
            2,
            tmp_path / "run",
            {"pids": str(pids)},
            timeout_s=limit_s,
        )
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 2 or function == "never_ends", "its time may end before it starts"
    assert not [
        pid
        for pid in started
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]
