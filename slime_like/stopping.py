"""When a run ends before its last rollout: a signal, a time limit, a number of rollouts. Looked at between rollouts, by all ranks together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

INTERRUPTED_STATUS = 75  # sysexits.h: try again later. Told apart from a finished run (0) and a failed one (1) by whoever starts the next


@dataclass(frozen=True, slots=True)
class Stop:
    """words: why. status: of the process; a stop that the command line asked for is no failure."""

    words: str
    status: int


class StopConditions:
    """every: rollouts, or None. minutes: since this object was made, or None."""

    def __init__(self, *, every: int | None, minutes: float | None) -> None:
        self.every = every
        self.minutes = minutes
        self.signalled: int | None = None
        self._started = time.monotonic()
        self._previous: object = None

    def catch(self, number: signal.Signals = signal.SIGTERM) -> None:
        """From now on the signal ends the run after the rollout that it comes in. A second one ends it at once."""
        self._previous = signal.signal(number, self._remember)

    def release(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._previous is not None:
            signal.signal(number, signal.SIG_DFL)

    def requested(self, rollouts_done: int, any_rank: Callable[[list[bool]], list[bool]]) -> Stop | None:
        """Collective: a signal may have reached one rank only, and clocks differ. any_rank: elementwise or over all ranks."""
        signalled, late = any_rank([self.signalled is not None, self._is_late()])
        if signalled:
            return Stop("SIGTERM", INTERRUPTED_STATUS)
        if late:
            return Stop(f"--exit-duration-in-mins {self.minutes:g}", 0)
        if self.every is not None and rollouts_done % self.every == 0:
            return Stop(f"--exit-interval {self.every}", 0)
        return None

    def _is_late(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._started > 60 * self.minutes

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number
        signal.signal(number, signal.SIG_DFL)
