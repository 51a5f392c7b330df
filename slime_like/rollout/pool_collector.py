"""Rollouts from a pool of episodes that never empties (--fully-async).

A rollout takes the groups of the pool that have ended; the others go on, with new weights as soon
as there are any. `EpisodePool` decides what starts and what is taken. With
--fully-async-single-samples its groups are single samples; those of one prompt are a group again in
a rollout and in checkpoints.

With an engine in every rank, all ranks advance all episodes in rounds, and new weights come between
two rollouts: which weights sample which token does not depend on timing, and a resumed run repeats
it bit by bit. With servers, episodes run in a thread of rank 0 (`pool_thread.py`), and new weights
come at any time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime_like.data.group_buffer import GroupBuffer, PendingGroup, apart, joined, oldest_first
from slime_like.distributed.collectives import is_rank_zero
from slime_like.engines.base import SamplingParams
from slime_like.errors import RunError
from slime_like.logs import warn_rank_0
from slime_like.rollout.collector import (
    Collected,
    CollectionStats,
    Collector,
    Decide,
    Groups,
    RoundGeneration,
    decide_locally,
)
from slime_like.rollout.episode_pool import EpisodePool, PoolSettings
from slime_like.rollout.filters import DYNAMIC_FILTER, GroupFilters
from slime_like.rollout.pool_thread import PoolThread
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.shared_groups import held_by_rank_zero
from slime_like.samples.exchange import refresh_index
from slime_like.samples.groups import flatten, regroup
from slime_like.samples.masking import mask_older

if TYPE_CHECKING:
    from arguments.schema import RolloutConfig, SchedulingConfig


logger = logging.getLogger(__name__)


class IdleShare:
    """The share of the time in which the engine had nothing to do."""

    def __init__(self) -> None:
        self._busy = False
        self._since = self._start = time.monotonic()
        self._idle_s = 0.0

    def set(self, *, busy: bool) -> None:
        """From now on the engine is busy or idle."""
        now = time.monotonic()
        if not self._busy:
            self._idle_s += now - self._since
        self._since = now
        self._busy = busy

    def take(self) -> float:
        """The share since the last call."""
        self.set(busy=self._busy)
        seconds = max(self._since - self._start, 1e-9)
        share = self._idle_s / seconds
        self._start = self._since
        self._idle_s = 0.0
        return share


@dataclass(slots=True)
class PoolStats(CollectionStats):
    """Counts since the last rollout; see `CollectionStats`."""

    stale_groups: int = 0  # dropped because all of their tokens were too stale
    stale_tokens: int = 0  # masked in groups that are trained on


class PoolCollector(Collector):
    """A `Collector` whose episodes outlive its rollouts. `advance`, `pause`, `position` and `close`
    are called by the training thread."""

    def __init__(
        self,
        settings: PoolSettings,
        scheduling: SchedulingConfig,
        rollout: RolloutConfig,
        rollouter: Rollouter,
        buffer: GroupBuffer,
        sampling: SamplingParams,
        filters: GroupFilters,
        *,
        max_failed: float,
        streams: bool,
    ) -> None:
        """See `Collector`. streams: with servers, in a thread of rank 0; otherwise in rounds."""
        super().__init__(
            scheduling,
            rollout,
            rollouter,
            buffer,
            sampling,
            filters,
            max_failed=max_failed,
            streams=streams,
        )
        self.pool = EpisodePool(settings)
        self._buffer = buffer
        self._clock = 0  # the rollout that has the current weights
        self._version = 0  # of these weights
        self._rounds = RoundGeneration(rollouter, sampling, self.slice_len)
        self._thread: PoolThread | None = None  # on rank 0, with servers
        self._stats = PoolStats()
        self._idle = IdleShare()
        self._ended_at: dict[tuple[int, int], float] = {}  # when finished groups ended, by key
        self._is_single = scheduling.fully_async_single_samples
        self._drawn = list[PendingGroup]()  # on all ranks, before there is room for them
        self._is_admitted = False  # the groups of a checkpoint are in the pool

    def advance(self, rollout_id: int, weight_version: int) -> None:
        """The engine has the weights with which this rollout is trained on next."""
        self._clock = rollout_id
        self._version = weight_version
        if self._thread is not None:
            self._thread.resume()

    def pause(self) -> None:
        """Let all episodes wait until `advance`; the engine is idle then."""
        if self._thread is not None:
            self._thread.pause()
            self._idle.set(busy=False)

    def close(self) -> None:
        """Abort all episodes."""
        if self._thread is not None:
            self._thread.close()

    def position(self) -> tuple[Mapping[str, object], tuple[PendingGroup, ...]]:
        """The prompt position, and all groups that were drawn and not taken: those in flight, in
        the order of their start and with the tokens that they have, then finished ones. With
        servers rank 0 has them all."""
        thread = self._thread
        if self.streams and not is_rank_zero():
            return self._buffer.source.state_dict(), ()
        if thread is None:
            return self._position(self._rounds.unfinished)

        async def position() -> tuple[Mapping[str, object], tuple[PendingGroup, ...]]:
            return self._position([*map(thread.responder.current, self.pool.in_flight.values())])

        return thread.call(position)

    def _source_state(self) -> Mapping[str, object]:
        """See `Collector`; the thread draws meanwhile."""
        source = self._buffer.source
        if self._thread is None:
            return source.state_dict()

        async def state() -> Mapping[str, object]:
            return source.state_dict()

        return self._thread.call(state)

    def _position(self, in_flight: Groups) -> tuple[Mapping[str, object], tuple[PendingGroup, ...]]:
        groups = [*in_flight, *self.pool.finished.values()]
        groups += [*held_by_rank_zero(self._drawn), *self._buffer.waiting]
        stored = joined(groups, lambda group: group.started)
        return self._buffer.source.state_dict(), tuple(stored)

    def collect(self, rollout_id: int) -> Collected:
        """See `Collector`."""
        if self.streams:
            return self._share_from_rank_zero(rollout_id, lambda: self._collect_stream(rollout_id))
        self._rounds.start(self._begin(rollout_id))
        decide = self._decide_on_rank_zero
        while True:
            self._rounds.start(self._start())
            self._idle.set(busy=True)
            ended = self._rounds.wait()
            self._finish(ended, decide)
            if self._is_ready():
                break
            assert self.pool.in_flight or self.pool.room(self._clock)
        self._idle.set(busy=False)
        return self._take(rollout_id, decide)

    def _collect_stream(self, rollout_id: int) -> Collected:
        """The next rollout, on rank 0."""
        if self._thread is None:
            self._thread = PoolThread(
                self.rollouter, self.sampling, start=self._start, finish=self._finish_one
            )
        thread = self._thread

        async def collect() -> Collected:
            thread.run(self._begin(rollout_id))
            thread.fill()
            await thread.until(self._is_ready)
            collected = self._take(rollout_id, decide_locally)
            thread.fill()
            return collected

        return thread.call(collect)

    def _begin(self, rollout_id: int) -> list[PendingGroup]:
        """Before a rollout. The first one of this process admits the groups of the checkpoint;
        returns those in flight."""
        self.pool.next_rollout = rollout_id
        if self._is_admitted:
            return []
        self._is_admitted = True
        stored = self._stored_groups()
        begun = [self._with_start(group) for group in stored if is_begun(group)]
        rejected = self.pool.admit(begun)
        if rejected:
            warn_rank_0(
                logger,
                f"{len(rejected)} groups of the checkpoint are too old for --max-staleness "
                f"{self.pool.settings.max_staleness}: they are sampled again",
            )
        self._drawn = [group.emptied() for group in rejected]
        self._drawn += [group.emptied() for group in stored if not is_begun(group)]
        return list(self.pool.in_flight.values())

    def _stored_groups(self) -> list[PendingGroup]:
        """The groups of the checkpoint, in this run's units."""
        groups = self._buffer.waiting
        self._buffer.waiting = []
        if self._is_single:
            return apart(groups)
        groups, again = self._buffer.whole(groups)
        if again:
            warn_rank_0(
                logger,
                f"{again} groups of the checkpoint are not whole and are sampled again: its run "
                "had --fully-async-single-samples, or another --n-samples-per-prompt",
            )
        return groups

    def _with_start(self, group: PendingGroup) -> PendingGroup:
        """The group of a checkpoint; --partial-rollout does not record when it started."""
        if group.started is not None:
            return group
        oldest = min(versions_of(group), default=self._version)
        return replace(group, started=self._clock - (self._version - oldest))

    def _start(self) -> list[PendingGroup]:
        """Draw the groups that may start now, and add them to the pool."""
        room = self.pool.room(self._clock)
        if not room:
            return []

        if len(self._drawn) < room:
            self._draw_prompts(room - len(self._drawn))
        groups = [replace(group, started=self._clock) for group in self._drawn[:room]]
        self._drawn = self._drawn[room:]
        self.pool.start(groups)
        if self._thread is not None:
            self._idle.set(busy=True)
        return groups

    def _draw_prompts(self, room: int) -> None:
        """Draw prompts for this many groups, or a few single samples more."""

        def choose(waiting: Groups, count: int) -> tuple[list[int], list[int]]:
            return oldest_first(self._clock, waiting, count)

        count = math.ceil(room / self._buffer.n_samples) if self._is_single else room
        groups, _ = self._buffer.take(count, choose)
        self._stats.draws += 1
        self._stats.drawn += len(groups)
        self._stats.drawn_samples += sum(len(group.samples) for group in groups)
        if self._is_single:
            groups = apart(groups)
        self._drawn += groups

    def _finish_one(self, group: PendingGroup) -> None:
        self._finish([group], decide_locally)
        self._idle.set(busy=bool(self.pool.in_flight))

    def _finish(self, ended: Groups, decide: Decide) -> None:
        """These groups have ended; the dynamic filter keeps or drops them. Raises RunError if it
        drops too many."""
        stats = self._stats
        now = time.monotonic()
        verdicts = self._apply_filter(stats, ended, len(self.pool), decide)
        for group, keep in zip(ended, verdicts, strict=True):
            self.pool.finish(group)
            self._ended_at[group.key] = now
            if not keep:
                self._drop(group)
        most = self.config.max_num_gen_batches * self.target
        if stats.dropped.total() >= most:
            raise RunError(
                f"rollout {self.pool.next_rollout + 1}: {DYNAMIC_FILTER} "
                f"{self.config.dynamic_sampling_filter_path} dropped {stats.dropped.total()} "
                f"groups, as many as {self.config.max_num_gen_batches} rollouts have "
                f"(--max-num-gen-batches): {dict(stats.dropped)}. Use easier or harder prompts, or "
                "another filter"
            )

    def _drop(self, group: PendingGroup) -> None:
        self.pool.drop(group)
        self._ended_at.pop(group.key, None)  # unknown for a group of the checkpoint
        self._stats.leave_out(group)
        self._buffer.observe([group])

    def _is_ready(self) -> bool:
        """Whether the next rollout can be taken. Groups of which nothing can be trained on any more
        are dropped first."""
        limit = self._oldest_version()
        for group in list(self.pool.finished.values()):
            versions = versions_of(group)
            if versions and max(versions) < limit:
                self._stats.stale_groups += 1
                self._drop(group)
        return self.pool.ready()

    def _oldest_version(self) -> int:
        """The oldest version whose tokens may be trained on in the next rollout. Every rollout
        makes one version at most, so it may be a little too new before the policy is trained."""
        ahead = self.pool.next_rollout - self._clock
        return self._version + ahead - self.pool.settings.max_staleness

    def _take(self, rollout_id: int, decide: Decide) -> Collected:
        """The next rollout, and metrics."""
        stats = self._stats
        self._stats = PoolStats()
        limit = self._oldest_version()
        taken = self.pool.take()
        now = time.monotonic()
        waited = [now - self._ended_at.pop(group.key, now) for group in taken]
        ages = [rollout_id - group.started for group in taken if group.started is not None]
        taken.sort(key=lambda group: group.key)
        groups = joined(taken, lambda group: None)
        self._buffer.observe(groups)
        groups = self._mask_stale(groups, limit, stats)
        self._check_failed(rollout_id, stats, groups, decide, ended=True)
        groups = self._mask_removed(groups, decide)
        metrics = stats.metrics(kept=len(groups), waiting=len(self.pool)) | self._buffer.metrics()
        metrics |= {
            "rollout/pool_in_flight": float(len(self.pool.in_flight)),
            "rollout/pool_finished": float(len(self.pool.finished)),
            "rollout/group_age_mean": sum(ages) / len(ages),
            "rollout/group_age_max": float(max(ages)),
            "rollout/stale_groups": float(stats.stale_groups),
            "rollout/stale_masked_tokens": float(stats.stale_tokens),
            "perf/pool_wait_s": sum(waited) / len(waited),
            "perf/engine_idle_frac": self._idle.take(),
        }
        prompts = [group.prompt for group in groups]
        return Collected([group.sample_group for group in groups], prompts, metrics)

    def _mask_stale(
        self, groups: Sequence[PendingGroup], limit: int, stats: PoolStats
    ) -> list[PendingGroup]:
        """Mask out the tokens of versions before `limit`; their samples still count in the baseline
        of their group."""
        if not any(min(versions_of(group), default=limit) < limit for group in groups):
            return list(groups)
        before = flatten(group.sample_group for group in groups)
        after = [mask_older(sample, limit) for sample in before]
        if not self.streams:
            after = refresh_index(after, self.rollouter.group)
        stats.stale_tokens += sum(s.active_tokens for s in before)
        stats.stale_tokens -= sum(s.active_tokens for s in after)
        masked = regroup([group.sample_group for group in groups], after)
        return [group.with_samples(each.samples) for group, each in zip(groups, masked)]


def is_begun(group: PendingGroup) -> bool:
    """Whether any sample of the group has tokens or has ended."""
    return any(sample.response_length or sample.ended for sample in group.samples)


def versions_of(group: PendingGroup) -> set[int]:
    """The weight versions that sampled the group's tokens."""
    return {version for sample in group.samples for version in sample.version_counts}
