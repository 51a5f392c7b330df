"""The guards in the report: what held, what did not, what ended the run; by the messages and metrics
of the trainer's own guards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.errors import RunError
from slime_like.guards.finite import check_finite
from slime_like.guards.rollout import LogProbGuard
from slime_like.guards.update import SkippedStepGuard, check_old_log_probs
from slime_like.metrics.logger import MetricsLogger
from slime_like.report.guards import GUARDS, guards
from slime_like.report.read import read_run
from slime_like.rollout.metrics import check_staleness
from tests.unit.report.runs import sample

DIFFERENCE = "rollout/train_rollout_log_prob_diff"


def states(
    folder: Path, rows: list[dict[str, float]], error: str = "", **config: Any
) -> dict[str, dict[str, Any]]:
    """By the first words of the guard."""
    with MetricsLogger(folder) as logger:
        for step, row in enumerate(rows, start=1):
            logger.log(step, row)
    (folder / "run.json").write_text(json.dumps({"config": config}))
    if error:
        (folder / "error.txt").write_text(f"error: {error}\n")
    return {str(state["name"]): dict(state) for state in guards(read_run(folder))}


def test_counts_and_limits(tmp_path: Path) -> None:
    differences = (0.01, 0.3, math.nan)
    rows = [
        {
            f"{DIFFERENCE}_mean": value,
            f"{DIFFERENCE}_p99": 0.02,
            "rollout/log_prob_gate_limit": 0.1,
            "rollout/staleness_max": float(step),
            "train/skipped_steps": float(min(step, 1)),
            "rollout/failed_frac": 0.25 if step == 2 else 0.0,
        }
        for step, value in enumerate(differences)
    ]
    found = states(tmp_path, rows, **{"--max-staleness": 2, "--max-failed-samples": 0.5})
    first = found["trainer and engine give the same log-probs"]
    assert (first["breaches"], first["rollouts"], first["limit"]) == (2, 3, 0.1)
    assert first["state"] == "did not hold" and first["highest"] is None
    stale = found["staleness, in weight versions"]
    assert (stale["state"], stale["highest"], stale["limit"]) == ("held", 2.0, 2.0)
    skipped = found["gradients are finite, else the step is skipped"]
    assert (skipped["breaches"], skipped["last"]) == (1, 1.0)  # a total
    rejected = found["no sample was rejected: each has a response and a usable reward"]
    assert (rejected["state"], rejected["breaches"], rejected["limit"]) == ("did not hold", 1, 0.5)
    assert list(found.values())[-1]["state"] == "not looked at"
    json.dumps(list(found.values()), allow_nan=False)


def difference(prefix: str = "") -> None:
    LogProbGuard(0.1, 1, prefix=prefix).check(0.5, 0.5, 1.0, 3)


def not_finite() -> None:
    bad = torch.tensor([0.0, math.nan])
    check_finite({"log-prob": [bad]}, [torch.ones(2, dtype=torch.bool)], ["7"], when="before")


ENDINGS = {
    "trainer and engine give the same log-probs": difference,
    "stale tokens: trainer and engine are near": lambda: difference("stale tokens: "),
    "staleness, in weight versions": lambda: check_staleness([sample(0, 1, "abc", 1.0)], 9, 1, "x"),
    "gradients are finite, else the step is skipped": lambda: SkippedStepGuard(1).check(True,
        math.inf),
    "the critic's gradients are finite": lambda: SkippedStepGuard(1, owner="critic's ").check(True,
        math.nan),
    "the loss and what it is made of are finite": not_finite,
    "the update computes the log-probs of the log-prob pass": lambda: check_old_log_probs(
        0.1, same_packing=True, half_precision=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_the_gate_that_ended_a_run_is_known_by_its_message(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        ENDINGS[name]()
    found = states(tmp_path, [{"train/loss": 0.1}], error=str(error.value))
    assert [n for n, state in found.items() if state["state"] == "ended the run"] == [name]


def test_every_message_is_tried() -> None:
    by_message = {guard.name for guard in GUARDS if guard.ended}
    assert by_message - ENDINGS.keys() == {
        "no sample was rejected: each has a response and a usable reward"  # tests/e2e/test_train.py
    }
