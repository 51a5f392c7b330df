"""Rollouts that are sampled while others are trained on (--async-rollout).

A thread samples one rollout after another, in their order, as far as it is allowed. Before rollout
k is trained on, k + max_staleness is allowed: at that moment the engine gets the weights that k is
trained from. So no token is older than max_staleness versions, and with 0 every rollout is sampled
by the weights that it is trained from, as without a thread. New weights reach a rollout in the
middle, between two tokens.

A checkpoint waits for what is being sampled, and holds the rollouts that were sampled and not
trained on. A resumed run trains on them, and so goes on exactly as the run that saved went on after
its save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_like.metrics.progress import SAMPLING_SECONDS
from slime_like.rollout.group_buffer import groups_from_rows, groups_to_rows
from slime_like.types import SampleGroup

Groups = tuple[list[SampleGroup], dict[str, float]]


class RolloutJson:
    """How groups and positions are written to a checkpoint as plain JSON, and read from one. All
    ranks call each method together; what rank 0 returns is written."""

    def groups_to_rows(self, groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
        return groups_to_rows(groups)

    def groups_from_rows(self, rows: Sequence[Mapping[str, object]]) -> list[SampleGroup]:
        return groups_from_rows(rows)

    def position_to_row(self, position: Any) -> dict[str, Any]:
        """A position that is plain JSON already."""
        row: dict[str, Any] = position
        return row


class AsyncRolloutQueue:
    """Samples in a thread, which the first `take` starts. make(step): samples a rollout; its
    collectives, on all ranks in the same order, are of a process group of its own. position(): the position of sampling, never changed."""

    def __init__(
        self,
        make: Callable[[int], Groups],
        position: Callable[[], object],
        *,
        max_staleness: int,
        json: RolloutJson | None = None,
    ) -> None:
        self.max_staleness = max_staleness
        # in the thread, once a rollout is there; a collective of the same process group
        self.deliver: Callable[[Sequence[SampleGroup]], None] | None = None
        self._make = make
        self._position = position
        self._json = json or RolloutJson()
        self._done: dict[int, Groups] = {}
        self._positions: dict[
            int, object
        ] = {}  # before each rollout that was sampled and not taken
        self._saved: dict[int, dict[str, object]] = {}  # of a checkpoint, in place of these
        self._next: int | None = None
        self._allowed = -1
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def allow(self, last: int) -> None:
        """Rollouts up to `last` may be sampled from now on."""
        with self._changed:
            self._allowed = max(self._allowed, last)
            self._changed.notify_all()

    def take(self, step: int) -> Groups:
        """The groups of a rollout, in the order of steps. Raises what sampling raised."""
        with self._changed:
            if self._thread is None:
                self._next = max([step, *(ahead + 1 for ahead in self._done)])
                self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: step in self._done or self._error is not None)
            if step not in self._done:
                assert self._error is not None
                raise self._error
            self._positions.pop(step, None)
            self._saved.pop(step, None)
            return self._done.pop(step)

    def drain(self) -> None:
        """Wait until all that is allowed is sampled: the engine is then idle on every rank, and
        stays so until more is allowed."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or (self._next or 0) > self._allowed
            )

    def state(self) -> dict[str, Any]:
        """The position before the first rollout that was not taken, as plain JSON. Where rollouts
        were sampled ahead, `sampled_ahead` has them, with the position behind them."""
        self.drain()
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._done:
                return self._json.position_to_row(self._position())
            ahead: list[dict[str, Any]] = [
                {
                    "step": step,
                    "groups": self._json.groups_to_rows(self._done[step][0]),
                    "metrics": {k: float(v).hex() for k, v in self._done[step][1].items()},
                    "before": self._row_before(step),
                }
                for step in sorted(self._done)
            ]
            behind = self._json.position_to_row(self._position())
            return {**ahead[0]["before"], "sampled_ahead": {"rollouts": ahead, "behind": behind}}

    def _row_before(self, step: int) -> dict[str, object]:
        """The position before a rollout that was sampled and not taken."""
        saved = self._saved.get(step)
        return self._json.position_to_row(self._positions[step]) if saved is None else saved

    def load_ahead(self, saved: Mapping[str, Any]) -> None:
        """Take over the rollouts of `state()["sampled_ahead"]`, before the first is sampled here.
        The caller has gone to the position behind them."""
        for row in saved["rollouts"]:
            metrics = {name: float.fromhex(value) for name, value in row["metrics"].items()}
            step = int(row["step"])
            self._done[step] = (self._json.groups_from_rows(row["groups"]), metrics)
            self._saved[step] = row["before"]

    def close(self) -> None:
        """No more rollouts; one that is being sampled is left to end with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        assert self._next is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._next or 0) <= self._allowed)
                if self._closed:
                    return
                step = self._next
            try:
                position, started = self._position(), time.perf_counter()
                groups, metrics = self._make(step)
                if self.deliver is not None:
                    self.deliver(groups)
                metrics = metrics | {SAMPLING_SECONDS: time.perf_counter() - started}
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done[step], self._positions[step] = (groups, metrics), position
                self._next = step + 1
                self._changed.notify_all()
