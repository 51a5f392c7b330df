"""Metrics of the optimizer steps of a rollout, and the per-token values that a recording gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_like.guards.update import SkippedStepGuard
from slime_like.trainer.rollout_record import record_training
from slime_like.trainer.train_step import averages
from slime_like.types import StepResult


def test_extremes_are_those_of_all_steps() -> None:
    """A spike of one step in eight is not an eighth of one."""
    numbers = [(1.0, 0.5), (900.0, 0.9), (1.1, 0.1)]
    steps = [
        StepResult(
            {
                "ratio_max": high,
                "cispo/ratio_min": low,
                "ratio_mean": high,
                "perf/x_over_mean": low,
            },
            grad_norm=high,
            learning_rate=low,
        )
        for high, low in numbers
    ]
    found = averages(steps, SkippedStepGuard(3))
    assert (found["train/ratio_max"], found["train/cispo/ratio_min"]) == (900.0, 0.1)
    assert found["train/ratio_mean"] == found["train/grad_norm"] == pytest.approx(902.1 / 3)
    assert found["perf/x_over_mean"] == pytest.approx(0.5) and found["train/lr"] == 0.1


@pytest.mark.parametrize("computed", [True, False])
def test_log_probs_of_the_engine_are_not_recorded_as_the_trainers(
    tmp_path: Path, computed: bool
) -> None:
    values = torch.arange(3.0)
    sample = SimpleNamespace(
        advantages=values, old_log_probs=-values, ref_log_probs=None, values=None,
        importance_weights=None,
    )  # fmt: skip
    batches: Any = SimpleNamespace(
        policy=[SimpleNamespace(samples=[sample])], sample_keys=["7"],
        entropies=[values + 1] if computed else [],
    )  # fmt: skip
    layout: Any = SimpleNamespace(tp_rank=0, cp_rank=0, pp_rank=0, dp_rank=0)
    record_training(str(tmp_path / "{rollout_id}"), 0, batches, layout)
    (file,) = tmp_path.glob("*.train0.safetensors")
    names = {"7.advantages", "7.old_log_probs", "7.entropy"} if computed else {"7.advantages"}
    assert load_file(file).keys() == names
