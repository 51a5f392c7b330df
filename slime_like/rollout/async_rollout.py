"""Asynchronous rollouts: sample ahead in a thread while training (--async-rollout).

The thread samples rollouts in order, up to a limit. Just before rollout k is trained on, the engine
gets the current weights and the limit rises to k + max_staleness. So no token is staler than
max_staleness weight versions, and with 0 every rollout is sampled on-policy, as without a thread.
New weights take effect within a rollout, between two tokens; on an engine in this process, between
two rollouts.

A checkpoint waits for requests in flight and stores the rollouts that were sampled but not trained
on. A resumed run trains on them, so it continues exactly as the run that saved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_like.metrics.timers import SAMPLING_SECONDS
from slime_like.rollout.generated import GeneratedRollout
from slime_like.rollout.group_rows import groups_from_rows, groups_to_rows
from slime_like.samples.groups import SampleGroup
from slime_like.samples.index import AnySample

if TYPE_CHECKING:
    from slime_like.checkpoints.state import AheadRow, SampledAhead, SamplingState, TrainerState


class RolloutJson:
    """Serialises groups and positions to plain JSON for a checkpoint, and back. Every method is
    collective; rank 0's result is written."""

    def groups_to_rows(self, groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
        return groups_to_rows(groups)

    def groups_from_rows(self, rows: Sequence[Mapping[str, object]]) -> list[SampleGroup]:
        return groups_from_rows(rows)

    def position_to_row(self, position: Any) -> SamplingState:
        """Default: the position is plain JSON already."""
        row: SamplingState = position
        return row


class AsyncRolloutQueue:
    """Samples rollouts in a thread, started by the first `take`.

    make(step): samples a rollout; its collectives use a separate process group. position(): the
    current sampling position, an immutable value.
    """

    def __init__(
        self,
        make: Callable[[int], GeneratedRollout],
        position: Callable[[], object],
        *,
        max_ahead: int,
        json: RolloutJson | None = None,
    ) -> None:
        """max_ahead: Rollouts that may be sampled before they are trained on."""
        self.max_ahead = max_ahead
        # called in the thread with the id of each rollout and its samples; collective over the same
        # process group
        self.deliver: Callable[[int, Sequence[AnySample]], None] = lambda rollout_id, samples: None
        self._make = make
        self._position = position
        self._json = json or RolloutJson()
        self._done: dict[int, GeneratedRollout] = {}
        # position before each rollout that is not taken yet
        self._positions: dict[int, object] = {}
        self._saved: dict[int, SamplingState] = {}  # the same, from a checkpoint
        self._next: int | None = None
        self._allowed = -1
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def allow(self, last: int) -> None:
        """Allow sampling of rollouts up to `last`. Wakes the sampling thread."""
        with self._changed:
            self._allowed = max(self._allowed, last)
            self._changed.notify_all()

    def take(self, step: int) -> GeneratedRollout:
        """Wait for rollout `step`; steps are taken in order. Re-raises errors of the
        sampling thread."""
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
        """Wait until all allowed rollouts are sampled. The engine is then idle on every rank until
        the next `allow`."""
        if self._thread is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or (self._next or 0) > self._allowed
            )

    def state(self) -> SamplingState:
        """Position before the first rollout that is not taken, as plain JSON. `sampled_ahead` holds
        the rollouts sampled ahead, if any, and the position after them."""
        self.drain()
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._done:
                return self._json.position_to_row(self._position())
            ahead = [self._ahead_row(step) for step in sorted(self._done)]
            behind = self._json.position_to_row(self._position())
            state: TrainerState = {
                **ahead[0]["before"],
                "sampled_ahead": {"rollouts": ahead, "behind": behind},
            }
            return state

    def _ahead_row(self, step: int) -> AheadRow:
        """Serialise a rollout that is sampled but not taken."""
        generated = self._done[step]
        before = self._saved.get(step)
        if before is None:
            before = self._json.position_to_row(self._positions[step])
        return {
            "step": step,
            "groups": self._json.groups_to_rows(generated.groups),
            "metrics": {name: float(value).hex() for name, value in generated.metrics.items()},
            "before": before,
        }

    def load_ahead(
        self,
        saved: SampledAhead,
        rollout_of: Callable[[Sequence[SampleGroup], Mapping[str, float]], GeneratedRollout],
    ) -> None:
        """Restore the rollouts of `state()["sampled_ahead"]` before sampling starts. The caller has
        restored the position after them. rollout_of: makes a rollout of its groups and metrics, as
        `make` did when they were sampled."""
        for row in saved["rollouts"]:
            metrics = {name: float.fromhex(value) for name, value in row["metrics"].items()}
            step = int(row["step"])
            groups = self._json.groups_from_rows(row["groups"])
            self._done[step] = rollout_of(groups, metrics)
            self._saved[step] = row["before"]

    def close(self) -> None:
        """Stop sampling after the rollout in flight, which is abandoned when the process ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """After `close`: wait for the rollout in flight; whether it has ended. A thread that still
        computes when the interpreter ends may abort the process, whose exit status is then that."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        assert self._next is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._next or 0) <= self._allowed)
                if self._closed:
                    return
                step = self._next
            try:
                position = self._position()
                started = time.perf_counter()
                generated = self._make(step)
                self.deliver(step, generated.samples)
                seconds = {SAMPLING_SECONDS: time.perf_counter() - started}
                generated = replace(generated, metrics={**generated.metrics, **seconds})
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done[step] = generated
                self._positions[step] = position
                self._next = step + 1
                self._changed.notify_all()
