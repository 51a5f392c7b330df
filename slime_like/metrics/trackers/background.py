"""Trackers in separate threads. What one does wrong is reported once and never stops or delays
the run."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from slime_like.metrics.trackers.base import (
    BUILT_IN,
    SampleTracker,
    Tracker,
    TrackerContext,
    trackers,
)
from slime_like.metrics.trackers.samples import has_table, sample_rows
from slime_like.text import clean

QUEUE_SIZE = 1000  # pending records of a slow tracker; further ones are dropped
FINISH_S = 120.0  # seconds for all trackers together, at the end of the run
Call = Callable[[Tracker], None]
logger = logging.getLogger(__name__)


class BackgroundTracker:
    """Creates a tracker in a thread, and forwards calls to it there.

    Args:
        name: For messages.
        make: Creates the tracker; it may be slow, raise or hang.
        queue_size: Maximum number of pending calls.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], *, queue_size: int = QUEUE_SIZE
    ) -> None:
        self.name = name
        self._make = make
        self._calls: queue.Queue[Call | None] = queue.Queue(queue_size)
        self._ended = threading.Event()
        self._failed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queue a call; never blocks or raises."""
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning(
                    "tracker %s does not keep up: records are left out of it (metrics.jsonl has "
                    "all)",
                    self.name,
                )

    def end(self) -> None:
        """Finish after the queued calls; `join` waits for this."""
        self._ended.set()
        with contextlib.suppress(queue.Full):  # a full queue: the thread does not wait for a call
            self._calls.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(max(timeout_s, 0.0))
        if self._thread.is_alive():
            logger.warning("tracker %s has not ended in time: it lacks the last records", self.name)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._next()) is not None:
                call(tracker)
            tracker.finish()
        except BaseException as error:  # SystemExit of a library as well
            self._failed = True
            logger.warning(
                "tracker %s failed and is left out from here on: %s: %s",
                self.name,
                type(error).__name__,
                clean(error),
            )

    def _next(self) -> Call | None:
        """Wait for a call; None after the last one."""
        try:
            return self._calls.get(block=not self._ended.is_set())
        except queue.Empty:
            return None


class TrackerSet:
    """The trackers of a run, on rank 0.

    Args:
        names: Values of --tracker; built-in ones that are always written are ignored.
        context: Of the run.
        finish_s: Time limit in seconds for all of them to finish.
    """

    def __init__(
        self, names: Sequence[str], context: TrackerContext, *, finish_s: float = FINISH_S
    ) -> None:
        self._finish_s = finish_s
        self._trackers = [
            BackgroundTracker(name, lambda name=name: trackers.get(name)(context))  # type: ignore[misc]
            for name in names
            if name not in BUILT_IN
        ]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        held = dict(values)
        for tracker in self._trackers:
            tracker.submit(lambda each: each.log(step, held))

    def log_samples(self, step: int, samples: Iterable[object]) -> None:
        """Send a table with a few samples of rollout `step` to the trackers that support it."""
        if not self._trackers or not has_table(step):
            return
        rows = sample_rows(step, samples)

        def log(each: Tracker) -> None:
            if isinstance(each, SampleTracker):
                each.log_samples(step, rows)

        for tracker in self._trackers:
            tracker.submit(log)

    def attach(self, path: Path) -> None:
        for tracker in self._trackers:
            tracker.submit(lambda each: each.attach(path))

    def close(self, finish_s: float | None = None) -> None:
        """Finish all trackers. finish_s: overrides the time limit of the constructor."""
        for tracker in self._trackers:
            tracker.end()
        deadline = time.monotonic() + (self._finish_s if finish_s is None else finish_s)
        for tracker in self._trackers:
            tracker.join(deadline - time.monotonic())
