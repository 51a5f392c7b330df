"""Activity of this process, reported to the watchdogs of other ranks: its phase, where its main
thread is, and whether it makes progress."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import FrameType

START = "start"
MOVED_S = 0.01  # CPU time between two pulses that counts as progress
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of a rank."""

    count: int  # increases with every pulse
    host: str
    process: int
    phase: str
    phases: int  # number of phases entered so far
    phase_s: float
    still_s: float  # seconds without progress of the main thread
    where: str
    waiting: bool  # inside a collective, for other ranks
    left: bool  # this rank has ended the run

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        return Heartbeat(**json.loads(text))

    def describe(self, rank: int) -> str:
        state = "working" if self.still_s < 1.0 else f"without a move for {self.still_s:.0f} s"
        if self.waiting:
            state = "waiting for other ranks"
        return (
            f"rank {rank} (host {self.host}, process {self.process}), last heard of in phase "
            f"{self.phase} for {self.phase_s:.1f} s, {state}, at {self.where}"
        )


class Activity:
    """Activity of this process; `enter` is called by the main thread, `pulse` by the watchdog's.
    changed: set when a phase begins."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.phase = START
        self._phases = 0
        self._since = self._moved_at = time.monotonic()
        self._count = 0
        self._cpu_s = 0.0
        self._where = ""
        self._main = threading.main_thread().ident
        assert self._main is not None
        self._clock = time.pthread_getcpuclockid(self._main)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._since = time.monotonic()
        self._phases += 1
        self.changed.set()

    def pulse(self, *, left: bool = False) -> Heartbeat:
        now = time.monotonic()
        cpu_s = time.clock_gettime(self._clock)
        where, waiting = _location(sys._current_frames().get(self._main or 0))
        if cpu_s - self._cpu_s > MOVED_S or where != self._where:
            self._moved_at = now
            self._cpu_s = cpu_s
            self._where = where
        self._count += 1
        since = self._since
        return Heartbeat(
            self._count,
            socket.gethostname(),
            os.getpid(),
            self.phase,
            self._phases,
            now - since,
            now - self._moved_at,
            where,
            waiting,
            left,
        )


def _location(frame: FrameType | None) -> tuple[str, bool]:
    """(innermost line of this project in the stack of `frame`, whether it waits in a
    collective)."""
    waiting = False
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}distributed{os.sep}" in file or file.endswith(
            "p2p_communication.py"
        ):
            waiting = True
        if file.startswith(ROOT) and "site-packages" not in file:
            return f"{os.path.relpath(file, ROOT)}:{frame.f_lineno} {frame.f_code.co_name}", waiting
        frame = frame.f_back
    return "a place outside this project", waiting
