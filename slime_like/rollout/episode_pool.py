"""The pool of --fully-async: which groups may start, which wait, and which are trained on next. A
group may be a single sample (--fully-async-single-samples).

Rollout j takes `batch` finished groups of the pool, the oldest first, whenever they began. While
rollout c is trained on (the clock), groups start with its weights, so a group that starts then is
due by rollout c + `max_staleness`: its oldest token is then exactly as stale as allowed.

    start:  n groups in the pool <= (c + max_staleness - j + 1) batch          (pacing)
    take:   for every d >= j, the groups due by d that remain <= (d - j) batch

The first rule makes the second one feasible for rollout j, and the second one for rollout j + 1. So
no token exceeds the bound and no group is dropped; training waits for a group only when it is due
and unfinished. Without the second rule (`waits` False) training waits only for enough groups, those
that are late do not count in the first one, and the caller masks what became too stale.

The pool holds no clock of its own and draws no random numbers: the same calls give the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime_like.data.group_buffer import PendingGroup


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Bounds of the pool. All are at least 1."""

    batch: int  # groups that a rollout takes, or single samples
    max_staleness: int  # of a token, in weight versions
    workers: int  # groups in flight at a time
    num_rollouts: int  # of the run: no group starts that none of them could take
    waits: bool = True  # training waits for groups that are due; False: never


class EpisodePool:
    """Groups from their start to their training. Not thread-safe."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.next_rollout = 0  # the rollout that is taken next
        # by key, in the order of their start
        self.in_flight: dict[tuple[int, int], PendingGroup] = {}
        self.finished: dict[tuple[int, int], PendingGroup] = {}
        # number of groups by the rollout that they are due by
        self._in_flight_due = Counter[int]()
        self._finished_due = Counter[int]()

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.finished)

    def room(self, clock: int) -> int:
        """How many groups may start now. clock: the rollout that has the current weights."""
        settings = self.settings
        last = min(clock + settings.max_staleness, settings.num_rollouts - 1)
        capacity = (last - self.next_rollout + 1) * settings.batch
        taking = len(self)
        if not settings.waits:  # groups that nobody waits for any more take up no place
            late = (n for due, n in self._in_flight_due.items() if due < self.next_rollout)
            taking -= sum(late)
        return max(0, min(settings.workers - len(self.in_flight), capacity - taking))

    def start(self, groups: Iterable[PendingGroup]) -> None:
        """Add groups, which know when they `started`; those that are graded are finished."""
        for group in groups:
            assert group.key not in self.in_flight
            self.in_flight[group.key] = group
            self._in_flight_due[self.due(group)] += 1
            if group.ended and group.is_graded:
                self.finish(group)

    def finish(self, group: PendingGroup) -> None:
        """A group in flight has ended."""
        del self.in_flight[group.key]
        self.finished[group.key] = group
        self._in_flight_due[self.due(group)] -= 1
        self._finished_due[self.due(group)] += 1

    def drop(self, group: PendingGroup) -> None:
        """Remove a finished group that is not trained on; another may start in its place."""
        del self.finished[group.key]
        self._finished_due[self.due(group)] -= 1

    def due(self, group: PendingGroup) -> int:
        """The last rollout in which the group's oldest token is not too stale."""
        assert group.started is not None
        return group.started + self.settings.max_staleness

    def ready(self) -> bool:
        """Whether the next rollout can be taken."""
        if len(self.finished) < self.settings.batch:
            return False
        return not self.settings.waits or not self._must_wait()

    def _must_wait(self) -> bool:
        """Whether the next rollout needs groups in flight: more of those that are due by some
        rollout are unfinished than the rollouts behind the next one take."""
        num_finished = num_unfinished = 0  # of the groups that are due by `last`
        for last in sorted(self._in_flight_due | self._finished_due):
            num_finished += self._finished_due[last]
            num_unfinished += self._in_flight_due[last]
            later = max(0, last - self.next_rollout) * self.settings.batch
            if num_finished < self.settings.batch and num_unfinished > later:
                return True
        return False

    def take(self) -> list[PendingGroup]:
        """The groups of the next rollout, which is `ready`: the oldest, in `age_order`."""
        chosen = sorted(self.finished.values(), key=age_order)[: self.settings.batch]
        for group in chosen:
            self.drop(group)
        self.next_rollout += 1
        self._in_flight_due += Counter()  # without what is 0
        self._finished_due += Counter()
        return chosen

    def admit(self, groups: Sequence[PendingGroup]) -> list[PendingGroup]:
        """Add the groups of a checkpoint, perhaps of a run with other bounds, in their order.

        Returns:
            Groups that would become too stale before they can be trained on, and which must be
            sampled again.
        """
        settings = self.settings
        admitted = set[tuple[int, int]]()
        for group in sorted(groups, key=age_order):
            rollouts = self.due(group) - self.next_rollout + 1
            if not settings.waits or len(self) + len(admitted) < rollouts * settings.batch:
                admitted.add(group.key)
        self.start(group for group in groups if group.key in admitted)
        return [group for group in groups if group.key not in admitted]


def age_order(group: PendingGroup) -> tuple[int, int, int]:
    """Sorts groups by age: by their start, then by key."""
    assert group.started is not None
    return group.started, *group.key
