"""Threads of a run on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.parse import parse_args
from slime_like.trainer import launch
from tests.unit.command_lines import complete


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch was told; it has 8."""
    told = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return told


def test_a_small_model_gets_one_thread(threads: list[int]) -> None:
    launch.use_one_thread_if_small(64)
    assert threads == [8, 1]


@pytest.mark.parametrize("why", ["large", "chosen", "gpu"])
def test_otherwise_the_threads_stay(
    why: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "chosen":
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    if why == "gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch.use_one_thread_if_small(512 if why == "large" else 64)
    assert threads == [8]


def test_the_first_line_says_threads_and_no_layout_of_one_process(threads: list[int]) -> None:
    layout: Any = SimpleNamespace(world_size=1)
    assert launch.processes_of(layout) == "1 process of 8 threads"
    launch.use_one_thread_if_small(64)
    assert launch.processes_of(layout) == "1 process"
    two: Any = SimpleNamespace(world_size=2, describe=lambda: "TP2 PP1 CP1 DP1")
    assert launch.processes_of(two) == "TP2 PP1 CP1 DP1, 2 processes"


def test_a_run_without_the_variable(
    threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepare`, which every program calls, decides by the model."""
    for name in ("set_up_logging", "die_with_the_launcher", "quiet_dependencies"):
        monkeypatch.setattr(launch, name, lambda *rank: None)
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: None)
    launch.prepare(parse_args(complete(tmp_path), 1), 1, [])
    assert threads == [8, 1]
