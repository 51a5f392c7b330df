"""Detect agent functions that block the event loop, and with it the gateway that they wait for: a
thread logs the blocking line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType

logger = logging.getLogger(__name__)
BLOCKED_S = 10.0


@dataclass(slots=True)
class LoopWatch:
    """Reports a user function that blocks the event loop."""

    name: str  # the flag and the function
    code: CodeType  # of the function
    seconds: float = BLOCKED_S  # maximum blocking time
    _users: int = 0
    _beat: float = 0.0  # event loop time, which may be paused
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch the running event loop inside the block; concurrent users share one thread."""
        self._users += 1
        if self._users == 1:
            self._stop = threading.Event()
            watched = (asyncio.get_running_loop(), self._stop)
            self._beat_periodically(*watched)
            threading.Thread(target=self._watch, args=watched, daemon=True).start()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._stop.set()

    def _beat_periodically(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        self._beat = loop.time()
        if not stop.is_set():
            loop.call_later(self.seconds / 10, self._beat_periodically, loop, stop)

    def _watch(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        while not stop.wait(self.seconds / 10):
            if loop.time() - self._beat < self.seconds:
                continue
            # each rollout may run the loop in another thread; None if it is not running
            thread = loop._thread_id  # type: ignore[attr-defined]
            place = self._line_of(sys._current_frames().get(thread))
            if place is not None:
                logger.error(
                    f"{self.name} blocks the event loop for more than {self.seconds:g} s at "
                    f"{place}: the gateway and other episodes wait; use await or asyncio.to_thread"
                )
                return

    def _line_of(self, frame: FrameType | None) -> str | None:
        """The line of the function that the thread is executing; None if it is elsewhere."""
        while frame is not None:
            if frame.f_code is self.code:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return None
