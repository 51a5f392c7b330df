"""What slime-like report warns of."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slime_like.metrics.health import HealthMonitor
from slime_like.report.alerts import COUNTERS
from slime_like.report.page import json_in_html, runs_data
from slime_like.report.read import read_run
from tests.unit.report.runs import run_with, write_run


def test_a_good_run_has_no_alert(tmp_path: Path) -> None:
    rows = [
        {"rollout/reward_mean": 0.1 * i, "perf/step_s": 1.0, "train/skipped_steps": 0.0}
        for i in range(9)
    ]
    assert run_with(tmp_path, rows, config={"--num-rollout": 9}) == []


@pytest.mark.parametrize(
    ("last", "level", "words"),
    [
        ({"rollout/reward_mean": math.nan}, "error", "rollout/reward_mean was NaN"),
        (
            {"engine/evictions": 1.0},
            "error",
            "rollout engines were lost in 1 rollout, first in rollout 9",
        ),
        ({"train/skipped_steps": 2.0}, "error", "optimizer steps were skipped"),
        ({"health/truncation": 1.0}, "warning", "health/truncation held"),
        (
            {"perf/step_s": 9.0},
            "warning",
            "1 rollout took more than 3 times the median of 1 s, 8 s longer in all, first rollout 9",
        ),
    ],
)
def test_a_fault_is_an_alert(
    tmp_path: Path, last: dict[str, float], level: str, words: str
) -> None:
    rows = [{"perf/step_s": 1.0, "engine/evictions": 0.0}] * 8
    (found,) = run_with(tmp_path, [*rows, {"perf/step_s": 1.0, **last}])
    assert found["level"] == level and words in found["text"] and found["metric"] in last


def test_a_warning_says_what_it_means_and_when_it_is_over(tmp_path: Path) -> None:
    monitor = HealthMonitor()
    rows = []
    for i in range(20):
        row = {"rollout/reward_mean": 0.5, "rollout/truncated_frac": 0.9 if i < 8 else 0.0}
        rows.append(row | monitor.check(row)[0])
    (found,) = run_with(tmp_path, rows)
    assert found["over"]
    assert found["text"].endswith("in 6 rollouts, first in rollout 5, and no more since rollout 11")
    assert "--custom-rm-path" in found["remedy"]


def test_a_fault_of_every_kind_has_a_remedy(tmp_path: Path) -> None:
    rows = [{"rollout/reward_mean": 1.0, **dict.fromkeys(COUNTERS, 0.0)}] * 8
    bad = {"rollout/reward_mean": math.nan, **dict.fromkeys(COUNTERS, 1.0)}
    found = run_with(tmp_path, [*rows, bad], config={"--num-rollout": 10})
    assert len(found) == len(COUNTERS) + 2 and all(alert["remedy"] for alert in found)


def test_a_total_is_an_alert_where_it_rises(tmp_path: Path) -> None:
    rows = [{"train/skipped_steps": float(i >= 3)} for i in range(9)]
    (found,) = run_with(tmp_path, rows)
    assert found["text"].endswith("in 1 rollout, first in rollout 4")


def test_slow_rollouts_that_cost_little_are_no_alert(tmp_path: Path) -> None:
    rows = [{"perf/step_s": 4.0 if i == 50 else 1.0} for i in range(100)]
    assert run_with(tmp_path, rows) == []


def test_an_infinite_setting(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    (tmp_path / "run.json").write_text('{"config": {"--clip": Infinity}}')
    run = read_run(tmp_path)
    assert json.loads(json_in_html(runs_data([run])))["runs"][0]["config"] == {"--clip": "Infinity"}


def test_a_reward_that_is_gamed(tmp_path: Path) -> None:
    rows = [
        {"rollout/reward_mean": 0.1 * i, "eval/heldout/mean": 0.9 - 0.05 * i} for i in range(10)
    ]
    (found,) = run_with(tmp_path, rows)
    assert "eval/heldout/mean fell by 0.4" in found["text"]


def test_a_slow_rank(tmp_path: Path) -> None:
    rows = [
        [["train", 1e9 + i, 1.0, 1.0 if rank == 1 else 0.3] for i in range(9)] for rank in range(3)
    ]
    (tmp_path / "timeline").mkdir()
    for rank, lines in enumerate(rows):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"timeline/rank{rank}.jsonl").write_text(text + '["train", 1')
    (found,) = run_with(tmp_path, [{"a": 1.0}])
    assert found["text"].startswith("rank 1 worked for 9 s, the others for 2.7 s")
