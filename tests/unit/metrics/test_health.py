"""Warnings about runs that learn nothing, on synthetic series."""

from __future__ import annotations

import json
import math

import pytest

from slime_like.metrics.health import PATIENCE, RULES, WINDOW, HealthMonitor

HEALTHY = {
    "rollout/reward_mean": 0.4,
    "rollout/reward_std": 0.3,
    "reward/zero_spread_group_frac": 0.1,
    "reward/singleton_groups": 0.0,
    "rollout/response_length_mean": 20.0,
    "rollout/truncated_frac": 0.05,
    "rollout/special_token_frac": 0.02,
    "train/entropy": 1.5,
}


def _watch(
    rows: list[dict[str, float]], monitor: HealthMonitor | None = None
) -> tuple[list[dict[str, float]], list[tuple[int, str]]]:
    """Metrics of every rollout, and (rollout, name) of every warning on the screen."""
    monitor = monitor or HealthMonitor()
    logged, shown = [], []
    for step, row in enumerate(rows):
        counted, texts = monitor.check(HEALTHY | row)
        logged.append(counted)
        shown += [(step, text.split(" ")[0]) for text in texts]
    return logged, shown


def _ramp(metric: str, start: float, end: float, rollouts: int = 20) -> list[dict[str, float]]:
    """A straight line, and then a window at its end."""
    line = [{metric: start + (end - start) * i / (rollouts - 1)} for i in range(rollouts)]
    return line + line[-1:] * WINDOW


def test_a_run_that_learns_is_silent() -> None:
    """Reward up, entropy and length down with it: what the demo does."""
    rows = [
        {
            "rollout/reward_mean": 0.4 + 0.5 * i / 60,
            "train/entropy": 1.5 * math.exp(-i / 15),
            "rollout/response_length_mean": 20.0 - 17.0 * i / 60,
        }
        for i in range(60)
    ]
    logged, shown = _watch(rows)
    assert shown == []
    assert logged == [{"health/warnings": 0.0}] * 60


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("no_reward", [{"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0}] * 6),
        ("constant_reward", [{"rollout/reward_mean": 0.8, "rollout/reward_std": 0.0}] * 6),
        ("no_spread", [{"reward/zero_spread_group_frac": 0.95}] * 6),
        ("no_tokens", [{"rollout/active_tokens": 9.0}, {"rollout/active_tokens": 0.0}]),
        ("truncation", _ramp("rollout/truncated_frac", 0.0, 0.57)),
        ("truncation", [{"rollout/truncated_frac": 0.8}] * 8),
        ("special_tokens", _ramp("rollout/special_token_frac", 0.01, 0.09)),
        ("special_tokens", [{"rollout/special_token_frac": 0.4}] * 8),
        ("length_collapse", _ramp("rollout/response_length_mean", 20.0, 1.0)),
        ("entropy_collapse", _ramp("train/entropy", 1.5, 0.01)),
    ],
)
def test_each_rule_warns_once_and_counts(name: str, rows: list[dict[str, float]]) -> None:
    logged, shown = _watch(rows)
    assert [rule for _, rule in shown] == [name]
    first = shown[0][0]
    assert logged[first][f"health/{name}"] == 1.0
    assert all(f"health/{name}" not in row for row in logged[:first])
    held = sum(f"health/{name}" in row for row in logged)
    assert held > 1 or first == len(rows) - 1
    assert sum(row["health/warnings"] for row in logged) == held


def test_a_warning_names_its_metric_and_a_flag() -> None:
    texts = []
    monitor = HealthMonitor()
    for _ in range(2 * WINDOW):
        row = {"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0, "rollout/truncated_frac": 1.0}
        texts += monitor.check(HEALTHY | row)[1]
    assert len(texts) == 2
    for text in texts:
        name = text.split(" ")[0]
        assert name in RULES
        assert f"health/{name}" in text
        assert "--" in text


@pytest.mark.parametrize("length", [1, PATIENCE - 1])
def test_a_short_spell_is_no_trouble(length: int) -> None:
    flat = {"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0}
    assert _watch([*[flat] * length, {}, *[flat] * length, {}])[1] == []


def test_groups_of_one_have_no_spread_by_nature() -> None:
    rows = [{"reward/zero_spread_group_frac": 1.0, "reward/singleton_groups": 4.0}] * 10
    assert _watch(rows)[1] == []


def test_rewards_of_0_are_the_point_of_a_distillation() -> None:
    rows = [{"rollout/reward_mean": 0.0, "rollout/reward_std": 0.0}] * 10
    assert _watch(rows, HealthMonitor(reward_trains=False))[1] == []


def test_missing_and_non_finite_metrics_are_passed_over() -> None:
    monitor = HealthMonitor()
    for row in [{}, {"rollout/reward_mean": math.nan}, {"train/entropy": math.inf}] * 4:
        assert monitor.check(row) == ({"health/warnings": 0.0}, [])


def test_a_resumed_run_counts_as_one_that_was_not_stopped() -> None:
    rows = [
        {**a, **b}
        for a, b in zip(_ramp("rollout/truncated_frac", 0.0, 0.9), _ramp("train/entropy", 1.5, 0.0))
    ]
    full, shown = _watch(rows)
    assert len(shown) == 2
    for cut in range(1, len(rows)):
        before = HealthMonitor()
        first, early = _watch(rows[:cut], before)
        after = HealthMonitor()
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        second, late = _watch(rows[cut:], after)
        assert first + second == full
        assert early + [(step + cut, name) for step, name in late] == shown
