"""Wall-clock time of the phases of a rollout, and figures derived from it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# in the order of a rollout; others are shown after these
PHASES = [
    "generate",
    "balance",
    "log_probs",
    "values",
    "train_critic",
    "train",
    "sync",
    "eval",
    "save",
]


STEP_SECONDS = "perf/step_s"


SAMPLING_SECONDS = "perf/sampling_s"  # time of the sampling thread, concurrent with the phases


def phase_metric(phase: str) -> str:
    return f"perf/{phase}_s"


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase from logged metrics: every ``perf/<phase>_s`` except the full step,
    concurrent times and rates."""
    seconds = {
        name.removeprefix("perf/").removesuffix("_s"): value
        for name, value in metrics.items()
        if name.startswith("perf/")
        and name.endswith("_s")
        and name not in (STEP_SECONDS, SAMPLING_SECONDS)
        and not name.endswith("_per_s")
    }
    order = {phase: i for i, phase in enumerate(PHASES)}
    return dict(sorted(seconds.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


class PhaseTimer:
    """Accumulates the seconds of each phase until they are taken. A phase that is entered twice in
    one rollout adds up. Phases do not nest, so their sum never exceeds the step. GPU work counts
    where the host waits for it."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.current_since = 0.0
        self._seconds: dict[str, float] = {}
        self._step_start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert self.current is None, f"phase {name!r} inside phase {self.current!r}"
        self.current = name
        self.current_since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = (
                self._seconds.get(name, 0.0) + time.perf_counter() - self.current_since
            )
            self.current = None

    def take(self) -> dict[str, float]:
        """``perf/<phase>_s`` of every phase since the last call, and ``perf/step_s``, the total
        time since then; starts the next step."""
        now = time.perf_counter()
        seconds = {phase_metric(name): value for name, value in self._seconds.items()}
        seconds[STEP_SECONDS] = now - self._step_start
        self._seconds = {}
        self._step_start = now
        return seconds


def speed_and_memory(metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second over the full step, and the peak memory of this process in GiB."""
    speed = {}
    if "rollout/tokens" in metrics and metrics.get(STEP_SECONDS):
        speed["perf/tokens_per_s"] = metrics["rollout/tokens"] / metrics[STEP_SECONDS]
    speed["perf/peak_rss_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return speed
