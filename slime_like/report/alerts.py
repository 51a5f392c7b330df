"""Problems of a run that are visible in its files; shown first on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from slime_like.metrics.timers import STEP_SECONDS
from slime_like.report.read import Run

# Counters that stay 0 in a healthy run, with the meaning of a nonzero value. TOTALS are counted
# from the start of the run.
COUNTERS = {
    "train/skipped_steps": "optimizer steps were skipped: the gradient norm was not finite",
    "train/critic_skipped_steps": "the critic's optimizer steps were skipped: the gradient norm "
    "was not finite",
    "rollout/failed_frac": "samples failed and trained nothing",
    "rollout/reward_nonfinite": "rewards were not finite",
    "rollout/log_probs_nonfinite": "log-probs of the engine were not finite",
    "engine/evictions": "rollout engines were lost",
    "perf/failed_saves": "checkpoints could not be written",
}
TOTALS = frozenset(
    {"train/skipped_steps", "train/critic_skipped_steps", "engine/evictions", "perf/failed_saves"}
)
SLOW_STEP = 3.0  # relative to the median
SLOW_RANK = 1.3  # relative to the median of the ranks
PART = 0.2  # share of a run, at its start and its end, that is compared


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert."""

    level: str  # "error" or "warning"
    text: str
    metric: str = ""  # the metric that shows it; "" for none


def alerts(run: Run) -> list[dict[str, str]]:
    """All alerts, errors first."""
    every = chain.from_iterable(rule(run) for rule in RULES)
    return [asdict(alert) for alert in sorted(every, key=lambda alert: alert.level)]


def _when(steps: list[int]) -> str:
    count = "1 rollout" if len(steps) == 1 else f"{len(steps)} rollouts"
    return f"in {count}, first in rollout {steps[0]}"


def not_finite(run: Run) -> Iterator[Alert]:
    for name in run.metrics:
        steps = [step for step, value in run.series(name) if not math.isfinite(value)]
        if steps:
            yield Alert("error", f"{name} was NaN or infinite {_when(steps)}", name)


def counters(run: Run) -> Iterator[Alert]:
    for name, text in COUNTERS.items():
        points = run.series(name)
        before = [0.0] * len(points)
        if name in TOTALS:
            before[1:] = [value for _, value in points[:-1]]
        steps = [step for (step, value), last in zip(points, before) if value > last]
        if steps:
            yield Alert("error", f"{text} {_when(steps)}", name)


def health(run: Run) -> Iterator[Alert]:
    for name in run.metrics:
        if name.startswith("health/") and name != "health/warnings":
            steps = [step for step, value in run.series(name) if value > 0]
            if steps:
                yield Alert("warning", f"{name} held {_when(steps)}", name)


def ended_early(run: Run) -> Iterator[Alert]:
    planned = run.record.get("config", {}).get("--num-rollout")
    last = max((int(row["step"]) for row in run.rows), default=0)
    if isinstance(planned, int) and last < planned:
        yield Alert("warning", f"{last} of {planned} rollouts: still running, or ended early")
    errors = [line for line in run.log if line.startswith("error: ")]
    for line in errors[:3]:
        yield Alert("error", line.removeprefix("error: ")[:300])


def slow_steps(run: Run) -> Iterator[Alert]:
    points = run.series(STEP_SECONDS)
    if len(points) < 5:
        return
    median = statistics.median(seconds for _, seconds in points)
    steps = [step for step, seconds in points[1:] if seconds > SLOW_STEP * median]
    if steps:
        text = (
            f"rollouts of more than {SLOW_STEP:g} times the median of {median:.3g} s {_when(steps)}"
        )
        yield Alert("warning", text, STEP_SECONDS)


def slow_ranks(run: Run) -> Iterator[Alert]:
    """Compare the ranks' own CPU time: others wait while a slow one works."""
    if len(run.timeline) < 2:
        return
    busy = {rank: sum(row[3] for row in rows) for rank, rows in run.timeline.items()}
    for rank, seconds in busy.items():
        median = statistics.median(other for each, other in busy.items() if each != rank)
        if seconds > SLOW_RANK * median and seconds - median > 1:
            text = f"rank {rank} worked for {seconds:.3g} s, the others for {median:.3g} s"
            yield Alert("warning", text)


def reward_hacking(run: Run) -> Iterator[Alert]:
    """The reward rises while an evaluation falls."""
    rise = _rise(run.series("rollout/reward_mean"))
    for name in run.metrics:
        if name.startswith("eval/") and name.endswith("/mean"):
            fall = _rise(run.series(name))
            if rise is not None and fall is not None and rise > 0.05 and fall < -0.05:
                text = (
                    f"the reward rose by {rise:.3g} while {name} fell by {-fall:.3g}: possible "
                    "reward hacking"
                )
                yield Alert("warning", text, name)


def _rise(points: list[tuple[int, float]]) -> float | None:
    """Change from the first to the last part of a curve; None for fewer than three points."""
    finite = [value for _, value in points if math.isfinite(value)]
    if len(finite) < 3:
        return None
    size = max(1, int(len(finite) * PART))
    return statistics.mean(finite[-size:]) - statistics.mean(finite[:size])


RULES: tuple[Callable[[Run], Iterator[Alert]], ...] = (
    not_finite,
    counters,
    ended_early,
    health,
    slow_ranks,
    slow_steps,
    reward_hacking,
)
