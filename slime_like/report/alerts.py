"""Problems of a run that are visible in its files; shown first on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from slime_like.metrics.health import meanings
from slime_like.metrics.timers import STEP_SECONDS
from slime_like.report.read import Run
from slime_like.text import duration


@dataclass(frozen=True, slots=True)
class Counter:
    """A metric that stays 0 in a healthy run."""

    text: str  # meaning of a nonzero value
    remedy: str
    total: bool = False  # counted from the start of the run


COUNTERS = {
    "train/skipped_steps": Counter(
        "optimizer steps were skipped: the gradient norm was not finite",
        "A skipped step changes no weight. Look at train/grad_norm and train/ratio_max of the "
        "rollouts before; a smaller --lr or more --lr-warmup-iters helps if they grew",
        total=True,
    ),
    "train/critic_skipped_steps": Counter(
        "the critic's optimizer steps were skipped: the gradient norm was not finite",
        "Look at train/value_loss of the rollouts before; a smaller --critic-lr or more "
        "--critic-lr-warmup-iters helps if it grew",
        total=True,
    ),
    "rollout/failed_frac": Counter(
        "samples failed and trained nothing",
        "Their reward function, agent or server failed. The output of the run has the first "
        "reason, recorded samples have each in their metadata; --max-failed-samples limits them",
    ),
    "rollout/reward_nonfinite": Counter(
        "rewards were not finite",
        "The reward function returned NaN or infinity, often a division by 0 for an empty "
        "response; such samples train nothing",
    ),
    "rollout/log_probs_nonfinite": Counter(
        "log-probs of the engine were not finite",
        "The engine's numbers overflowed: compare its precision with the trainer's",
    ),
    "engine/evictions": Counter(
        "rollout engines were lost",
        "The others took over their requests. The server's own log says why it ended",
        total=True,
    ),
    "perf/failed_saves": Counter(
        "checkpoints could not be written",
        "The run goes on without them. Look at the space and the rights of --save",
        total=True,
    ),
}
NOT_FINITE = (
    "Numbers overflowed, or something was divided by 0. Look at the rollout before the first one: "
    "rewards, train/grad_norm, train/ratio_max"
)
SLOW_STEP = 3.0  # relative to the median
SLOW_SHARE = 0.1  # of the run's time, that slow rollouts must have cost beyond the median
SLOW_REMEDY = (
    "The page Time shows which phase took longer. Where it is another each time, other programs "
    "use the machine"
)
SLOW_RANK = 1.3  # relative to the median of the ranks
PART = 0.2  # share of a run, at its start and its end, that is compared


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert."""

    level: str  # "error" or "warning"
    text: str
    metric: str = ""  # the metric that shows it; "" for none
    remedy: str = ""  # what it means, and what to do
    over: bool = False  # it does not hold any more


def alerts(run: Run) -> list[dict[str, str]]:
    """All alerts: errors first, those that are over last."""
    every = chain.from_iterable(rule(run) for rule in RULES)
    return [asdict(alert) for alert in sorted(every, key=lambda alert: (alert.over, alert.level))]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _when(steps: list[int]) -> str:
    count = "1 rollout" if len(steps) == 1 else f"{len(steps)} rollouts"
    return f"in {count}, first in rollout {steps[0]}"


def not_finite(run: Run) -> Iterator[Alert]:
    for name in run.metrics:
        steps = [step for step, value in run.series(name) if not math.isfinite(value)]
        if steps:
            yield Alert("error", f"{name} was NaN or infinite {_when(steps)}", name, NOT_FINITE)


def counters(run: Run) -> Iterator[Alert]:
    for name, counter in COUNTERS.items():
        points = run.series(name)
        before = [0.0] * len(points)
        if counter.total:
            before[1:] = [value for _, value in points[:-1]]
        steps = [step for (step, value), last in zip(points, before) if value > last]
        if steps:
            yield Alert("error", f"{counter.text} {_when(steps)}", name, counter.remedy)


def health(run: Run) -> Iterator[Alert]:
    means = meanings(run.rows)
    for name in run.metrics:
        if name.startswith("health/") and name != "health/warnings":
            steps = [step for step, value in run.series(name) if value > 0]
            if steps:
                last = max(step for step, _ in run.series("health/warnings") or [(0, 0.0)])
                over = steps[-1] < last
                text = f"{name} held {_when(steps)}"
                if over:
                    text += f", and no more since rollout {steps[-1] + 1}"
                yield Alert("warning", text, name, _sentence(means.get(name, "")), over)


def ended_early(run: Run) -> Iterator[Alert]:
    planned = run.record.get("config", {}).get("--num-rollout")
    last = max((int(row["step"]) for row in run.rows), default=0)
    if isinstance(planned, int) and last < planned:
        text = f"{last} of {planned} rollouts: still running, or ended early"
        yield Alert("warning", text, remedy="With --save and --load, the same command goes on here")
    errors = [line for line in run.log if line.startswith("error: ")]
    for line in errors[:3]:
        yield Alert("error", line.removeprefix("error: ")[:300])


def slow_steps(run: Run) -> Iterator[Alert]:
    points = run.series(STEP_SECONDS)
    if len(points) < 5:
        return
    median = statistics.median(seconds for _, seconds in points)
    slow = [(step, seconds) for step, seconds in points[1:] if seconds > SLOW_STEP * median]
    steps = [step for step, _ in slow]
    lost = sum(seconds - median for _, seconds in slow)
    if lost > SLOW_SHARE * sum(seconds for _, seconds in points):
        count = "1 rollout" if len(steps) == 1 else f"{len(steps)} rollouts"
        text = (
            f"{count} took more than {SLOW_STEP:g} times the median of {duration(median)}, "
            f"{duration(lost)} longer in all, first rollout {steps[0]}"
        )
        yield Alert("warning", text, STEP_SECONDS, SLOW_REMEDY)


def slow_ranks(run: Run) -> Iterator[Alert]:
    """Compare the ranks' own CPU time: others wait while a slow one works."""
    if len(run.timeline) < 2:
        return
    busy = {rank: sum(row[3] for row in rows) for rank, rows in run.timeline.items()}
    for rank, seconds in busy.items():
        median = statistics.median(other for each, other in busy.items() if each != rank)
        if seconds > SLOW_RANK * median and seconds - median > 1:
            text = f"rank {rank} worked for {duration(seconds)}, the others for {duration(median)}"
            remedy = (
                "The others wait for it in each step: look for other programs, a slower clock or a "
                "slower disk on its machine, or whether its share of the samples is longer"
            )
            yield Alert("warning", text, remedy=remedy)


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
                remedy = (
                    "The policy may earn what you do not want. Read the best responses of the last "
                    "rollout, mend the reward, or hold the policy near the first one "
                    "(--use-kl-loss)"
                )
                yield Alert("warning", text, name, remedy)


def certificates(run: Run) -> Iterator[Alert]:
    """Differences that certificates name; over if the last certificate has none."""
    last = run.certificates[-1] if run.certificates else None
    for row in run.certificates:
        for text in row["texts"][:3]:
            remedy = f"certificates/{row['file']} has every layer's difference and its limit"
            over = last is not None and last["holds"]
            when = f"rollout {row['rollout']}: {text}"
            yield Alert("warning", when, "certificate/findings", remedy, over)


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
    certificates,
)
