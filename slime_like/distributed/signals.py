"""Conditions that end a run before its last rollout: a signal, a time limit, a number of rollouts.
Checked between rollouts, collectively."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

# EX_TEMPFAIL of sysexits.h: lets a launcher distinguish an interrupted run from a finished (0) or
# failed (1) one
INTERRUPTED_STATUS = 75
CTRL_C_STATUS = 128 + signal.SIGINT
# SLURM signals every process of a job, and torchrun forwards its signals: signals within this time
# count as one. After Ctrl-C, a user repeats sooner
REPEAT_S = 5.0
REPEAT_CTRL_C_S = 1.0
STATUS_FILE = "SLIME_LIKE_STATUS_FILE"
LAUNCHER_STATUS_FILE = "SLIME_LIKE_LAUNCHER_STATUS_FILE"  # of python -m slime_like.torchrun
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP", signal.SIGINT: "Ctrl-C"}


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """A request to end the run."""

    reason: str
    status: int  # exit status; 0 for a stop requested on the command line
    urgent: bool = True  # skip everything that can be done later


class StopConditions:
    """Conditions that end the run after a rollout.

    Args:
        every: End after every so many rollouts; None: never.
        minutes: Time limit since the creation of this object; None: no limit.
        announce: Acknowledge a signal on stderr when it arrives (rank 0).
    """

    def __init__(self, *, every: int | None, minutes: float | None, announce: bool = False) -> None:
        self.every = every
        self.minutes = minutes
        self.signalled: int | None = None
        self._announce = announce
        self._signalled_at = 0.0
        self._started = time.monotonic()

    def catch(self, *numbers: signal.Signals) -> None:
        """Install handlers: these signals (default SIGTERM) end the run after the current rollout.
        A second one, more than `REPEAT_S` (`REPEAT_CTRL_C_S`) later, ends it at once. Signals that
        the parent process ignores, as under nohup, stay ignored."""
        for number in numbers or (signal.SIGTERM,):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._remember)

    def requested(
        self, rollouts_done: int, any_rank: Callable[[list[bool]], list[bool]]
    ) -> ExitRequest | None:
        """The request to end the run now, if any. Collective, because a signal may have reached one
        rank only, and clocks differ. any_rank: elementwise logical or over all ranks."""
        flags = [*(self.signalled == number for number in SIGNALS), self._is_late()]
        *signalled, late = any_rank(flags)
        for number, is_signalled in zip(SIGNALS, signalled, strict=True):
            if is_signalled:
                status = CTRL_C_STATUS if number == signal.SIGINT else INTERRUPTED_STATUS
                return ExitRequest(_NAMES[number], status)
        if late:
            return ExitRequest(f"--exit-duration-in-mins {self.minutes:g}", 0)
        if self.every is not None and rollouts_done % self.every == 0:
            return ExitRequest(f"--exit-interval {self.every}", 0, urgent=False)
        return None

    def _is_late(self) -> bool:
        return self.minutes is not None and time.monotonic() - self._started > 60 * self.minutes

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_ctrl_c = number == signal.SIGINT
        if self.signalled is None:
            self.signalled = number
            self._signalled_at = now
            if self._announce:
                again = "; Ctrl-C again ends it at once" if is_ctrl_c else ""
                _write(f"{_name(number)}: the run ends after this rollout{again}")
        elif now - self._signalled_at > (REPEAT_CTRL_C_S if is_ctrl_c else REPEAT_S):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def end_at_once(rank: int, *, resumable: bool, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
    """Install handlers for the time before `StopConditions.catch`: signals end the process at once,
    as there is nothing to save yet.

    Args:
        resumable: The same command line may be started again.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ctrl_c = number == signal.SIGINT
        status = INTERRUPTED_STATUS if resumable and not ctrl_c else 128 + number
        if rank == 0:
            _write("interrupted" if ctrl_c else f"stopped by {_name(number)}")
        leave_status(status, rank)
        os._exit(status)

    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def end_with(status: int) -> NoReturn:
    """Exit with `status`. After a Ctrl-C during an import, Python would otherwise end by SIGINT
    regardless of the status."""
    if status == CTRL_C_STATUS:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def leave_status(status: int, rank: int) -> None:
    """Write the exit status, on rank 0, to the files named by the environment, because torchrun
    turns every nonzero status into 1."""
    for variable in (STATUS_FILE, LAUNCHER_STATUS_FILE):
        path = os.environ.get(variable)
        if path and rank == 0:
            Path(path).write_text(f"{status}\n", encoding="ascii")


def _name(number: int) -> str:
    return _NAMES[signal.Signals(number)]


def _write(text: str) -> None:
    """Write to stderr from a signal handler, without the stream object, which may be locked."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return  # stderr is closed
