"""When a run ends before its last rollout: a signal, a time limit, a number of rollouts. Looked at between rollouts, by all ranks together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERRUPTED_STATUS = 75  # sysexits.h: try again later. Told apart from a finished run (0) and a failed one (1) by whoever starts the next
TERMINATED_STATUS = 128 + signal.SIGTERM
REPEAT_S = 5.0  # SLURM signals every process of a job, and torchrun passes on what it gets: within this it is one signal
STATUS_FILE = "SLIME_LIKE_STATUS_FILE"


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """words: why. status: of the process; a stop that the command line asked for is no failure. hurried: what can be done later is left."""

    words: str
    status: int
    hurried: bool = True


class StopConditions:
    """every: rollouts, or None. minutes: since this object was made, or None."""

    def __init__(self, *, every: int | None, minutes: float | None) -> None:
        self.every = every
        self.minutes = minutes
        self.signalled: int | None = None
        self._signalled_at = 0.0
        self._started = time.monotonic()

    def catch(self, number: signal.Signals = signal.SIGTERM) -> None:
        """From now on the signal ends the run after the rollout that it comes in. A second one, later than `REPEAT_S`, ends it at once."""
        signal.signal(number, self._remember)

    def requested(
        self, rollouts_done: int, any_rank: Callable[[list[bool]], list[bool]]
    ) -> ExitRequest | None:
        """Collective: a signal may have reached one rank only, and clocks differ. any_rank: elementwise or over all ranks."""
        signalled, late = any_rank([self.signalled is not None, self._is_late()])
        if signalled:
            return ExitRequest("SIGTERM", INTERRUPTED_STATUS)
        if late:
            return ExitRequest(f"--exit-duration-in-mins {self.minutes:g}", 0)
        if self.every is not None and rollouts_done % self.every == 0:
            return ExitRequest(f"--exit-interval {self.every}", 0, hurried=False)
        return None

    def _is_late(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._started > 60 * self.minutes

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signalled is None:
            self.signalled, self._signalled_at = number, now
        elif now - self._signalled_at > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def end_at_once_on_sigterm(rank: int, *, resumable: bool) -> None:
    """Until `StopConditions.catch`: nothing has been trained on that could be saved. resumable: the same command line may be started again."""
    status = INTERRUPTED_STATUS if resumable else TERMINATED_STATUS

    def end(number: int, frame: FrameType | None) -> None:
        leave_status(status, rank)
        os._exit(status)

    signal.signal(signal.SIGTERM, end)


def leave_status(status: int, rank: int) -> None:
    """Rank 0 writes its exit status into the file that the environment names: torchrun has one status, 1, for all that is not 0."""
    path = os.environ.get(STATUS_FILE)
    if path and rank == 0:
        Path(path).write_text(f"{status}\n", encoding="ascii")
