"""The guards of a run, which are numeric guards, with their limits and counts: whether each was
evaluated, how often it was violated, and whether it ended the run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from slime_like.report.read import Run

LIMIT = "rollout/log_prob_gate_limit"


@dataclass(frozen=True, slots=True)
class Guard:
    """A numeric guard on the page."""

    name: str
    metrics: tuple[str, ...]  # the values that it limits; the worst is shown
    limit: float | str | None = None  # a number, a flag, or a metric
    # metric that is above 0 (for a total: rises) in a rollout with a breach; without one, metrics
    # are compared with the limit
    counter: str = ""
    total: bool = False
    ended: str = ""  # pattern of the error message if the guard ended the run


_DIFFERENCE = "rollout/train_rollout_log_prob_diff"
GUARDS = (
    Guard(
        "trainer and engine give the same log-probs",
        (f"{_DIFFERENCE}_mean", f"{_DIFFERENCE}_p99"),
        LIMIT,
        ended=r"(?<!stale tokens: )trainer and sampler disagree",
    ),
    Guard(
        "stale tokens: trainer and engine are near",
        ("rollout/stale_log_prob_diff_mean",),
        1.0,
        ended="stale tokens: trainer and sampler disagree",
    ),
    Guard(
        "staleness, in weight versions",
        ("rollout/staleness_max",),
        "--max-staleness",
        ended="has tokens of weight version",
    ),
    Guard("log-probs of the engine are finite", ("rollout/log_probs_nonfinite",), 0.0),
    Guard(
        "gradients are finite, else the step is skipped",
        ("train/skipped_steps",),
        counter="train/skipped_steps",
        total=True,
        ended=r"(?<!critic's )optimizer step skipped",
    ),
    Guard(
        "the critic's gradients are finite",
        ("train/critic_skipped_steps",),
        counter="train/critic_skipped_steps",
        total=True,
        ended="critic's optimizer step skipped",
    ),
    Guard(
        "the loss and what it is made of are finite",
        ("train/loss",),
        ended=r" of sample .* is (nan|-?inf) at token",
    ),
    Guard("rewards are finite", ("rollout/reward_nonfinite",), 0.0),
    Guard(
        "no sample was rejected: each has a response and a usable reward",
        ("rollout/failed_frac",),
        "--max-failed-samples",
        counter="rollout/failed_frac",
        ended="failed samples|--max-failed-samples",
    ),
    Guard("no answer of a server was rejected", ("engine/rejected",), 0.0),
    Guard(
        "the update computes the log-probs of the log-prob pass",
        (),
        ended="log-probs of the update differ from the recomputed",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """State of a guard in one run."""

    name: str
    state: str  # "held", "did not hold", "ended the run" or "not looked at"
    metric: str = ""  # the one with the `highest` value
    limit: float | None = None
    last: float | None = None
    highest: float | None = None
    rollouts: int = 0  # number in which it was evaluated
    breaches: int = 0  # number of those in which it did not hold


def guards(run: Run) -> list[dict[str, object]]:
    """States of all guards; those that were evaluated or ended the run come first, in the order of
    GUARDS. NaN and infinity become null."""
    states = [_state(guard, run) for guard in GUARDS]
    states.sort(key=lambda state: state.state == "not looked at")
    return [asdict(state) for state in states]


def _state(guard: Guard, run: Run) -> State:
    ended = bool(guard.ended) and any(re.search(guard.ended, line, re.I) for line in _errors(run))
    series = {name: run.series(name) for name in guard.metrics}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return State(guard.name, "ended the run" if ended else "not looked at")
    limit = _limit(guard, run)
    highest = {name: max(_worst(value) for _, value in points) for name, points in series.items()}
    worst = max(highest, key=lambda name: highest[name])
    steps: set[int] = set()
    breaches: set[int] = set()
    for name, points in series.items():
        steps.update(step for step, _ in points)
        breaches.update(_breaches(guard, name, points, limit))
    state = "did not hold" if breaches else "held"
    return State(
        guard.name,
        "ended the run" if ended else state,
        worst,
        limit,
        _finite(series[worst][-1][1]),
        _finite(highest[worst]),
        len(steps),
        len(breaches),
    )


def _breaches(
    guard: Guard, metric: str, points: list[tuple[int, float]], limit: float | None
) -> Iterator[int]:
    before = 0.0
    for step, value in points:
        if metric == guard.counter:
            bad = not value <= (before if guard.total else 0.0)
            before = value
        else:
            bad = not math.isfinite(value) or (limit is not None and value > limit)
        if bad:
            yield step


def _limit(guard: Guard, run: Run) -> float | None:
    if isinstance(guard.limit, str) and not guard.limit.startswith("--"):
        points = run.series(guard.limit)
        return points[-1][1] if points else None
    value = guard.limit
    if isinstance(value, str):
        value = run.record.get("config", {}).get(value)
    return float(value) if isinstance(value, int | float) else None


def _errors(run: Run) -> list[str]:
    return [line for line in run.log if line.startswith("error: ")]


def _worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
