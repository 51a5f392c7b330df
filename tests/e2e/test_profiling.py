"""Traces of a run, its speed, and that both change no number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of, same_numbers
from tests.e2e.programs import TrainServer

PROFILE = dict(profile="", use_pytorch_profiler="", profile_step_start=1, profile_step_end=2)


@pytest.fixture(scope="module")
def traced(server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rollouts of two ranks; the second rank's second rollout is traced."""
    out = tmp_path_factory.mktemp("traced")
    flags = work.flags(out, num_rollout=3, profile_ranks=1, device_peak_tflops=1, **PROFILE)  # type: ignore[arg-type]
    server.train(flags, out / "log", ranks=2).ok()
    return out


def test_a_trace(traced: Path) -> None:
    """As Perfetto reads it: named spans with a begin and a length, of which those of a phase lie
    within the rollout, and products within the training."""
    (path,) = (traced / "profile").iterdir()
    assert path.name == "rank1_rollouts2-2.json.gz"
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]

    def one(name: str) -> tuple[float, float]:
        (found,) = (e for e in spans if e["name"] == name and e["cat"] == "user_annotation")
        return found["ts"], found["ts"] + found["dur"]

    rollout, train, generate = one("rollout 2"), one("phase train"), one("phase generate")
    assert rollout[0] <= generate[0] < generate[1] <= train[0] < train[1] <= rollout[1]
    assert any(e["name"] == "aten::mm" and train[0] <= e["ts"] <= train[1] for e in spans)
    assert not any(e["name"] in ("rollout 1", "rollout 3") for e in spans)


def test_speed_of_every_rollout(traced: Path) -> None:
    for row in rows_of(traced):
        reached = row["perf/actor_train_tflops"]
        assert 0 < row["perf/step_tflops"] < reached
        assert row["perf/mfu"] == reached  # of 1 TFLOP/s
        assert row["perf/actor_train_tok_per_s"] == row["rollout/tokens"] / row["perf/train_s"]
        assert row["perf/tokens_per_s_per_device"] == pytest.approx(row["perf/tokens_per_s"] / 2)


@pytest.mark.extended
def test_a_trace_changes_no_number(
    server: TrainServer, work: Workspace, traced: Path, tmp_path: Path
) -> None:
    """And without its flag there is none."""
    server.train(work.flags(tmp_path, num_rollout=3), tmp_path / "log", ranks=2).ok()
    assert same_numbers(rows_of(tmp_path)) == same_numbers(rows_of(traced))
    assert not (tmp_path / "profile").exists()
    assert "perf/mfu" not in rows_of(tmp_path)[0]
