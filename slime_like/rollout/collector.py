"""One rollout's groups: prompts are drawn, sampled and filtered until there are enough; the rest
waits for the next rollout or is lost.

The loop is the same for every engine. How groups grow is a `Generation`: in rounds that all ranks
take together (`RoundGeneration`), where what is kept depends on lengths and rewards alone, not on
time, ranks or layout; or request by request on rank 0 (`streaming.py`), where servers abort what a
rollout does not need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from arguments.run_config import RunConfig
from slime_like.distributed.collectives import from_rank_zero_within
from slime_like.errors import RunError
from slime_like.rollout.engines.base import SamplingParams
from slime_like.rollout.filters import BUILT_IN_FILTERS, DYNAMIC_FILTER, GroupFilters, is_kept
from slime_like.rollout.group_buffer import Choose, GroupBuffer, PendingGroup, oldest_first
from slime_like.rollout.rank_zero import DecideOnRankZero, groups_of_index, index_of_groups
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.streaming import Responder, StreamGeneration
from slime_like.sample_index import AnySample, RemoteSample, untrained
from slime_like.types import Prompt, SampleGroup

T = TypeVar("T")
Groups = Sequence[PendingGroup]


class Decide(Protocol):
    """Calls a user's function where it runs, for all ranks."""

    def __call__(self, function: Callable[[Groups], T], groups: Groups) -> T:
        """function: gets the groups, with all of their samples."""
        ...


def decide_here(function: Callable[[Groups], T], groups: Groups) -> T:
    """Where one rank collects, and has all samples."""
    return function(groups)


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of a rollout by rising id, their prompts, as far as this rank knows them, and
    metrics about how they were found."""

    groups: list[SampleGroup]
    prompts: list[Prompt]
    metrics: dict[str, float]


@dataclass(slots=True)
class CollectionStats:
    """Counts, of groups unless the name has another unit.

    draws: of prompts. resumed: drawn with tokens of an earlier rollout. surplus: good ones above
    what is needed. lost: unfinished when there were enough. discarded: by the buffer's filter.
    late: cut short by --rollout-time-limit-s. dropped: by the dynamic filter, by reason.
    wasted_tokens: sampled for nothing. masked_tokens: of earlier rollouts, not trained on.
    """

    draws: int = 0
    drawn: int = 0
    resumed: int = 0
    surplus: int = 0
    lost: int = 0
    discarded: int = 0
    late: int = 0
    wasted_tokens: int = 0
    masked_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def metrics(self, *, kept: int, waiting: int) -> dict[str, float]:
        """To be logged. waiting: groups for the next rollout."""
        groups = dict(
            drawn=self.drawn,
            resumed=self.resumed,
            kept=kept,
            dropped=self.dropped.total(),
            surplus=self.surplus,
            lost=self.lost,
            waiting=waiting,
            discarded=self.discarded,
            late=self.late,
        )
        metrics = {f"groups_{name}": count for name, count in groups.items()}
        metrics |= dict(draws=self.draws, wasted_tokens=self.wasted_tokens)
        metrics |= dict(off_policy_masked_tokens=self.masked_tokens)
        reasons = sorted(self.dropped.items())
        metrics |= {f"dynamic_filter/drop_{reason}": count for reason, count in reasons}
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}


class GroupSource(Protocol):
    """What groups are drawn from and what waits goes back to: a `GroupBuffer`, or a user's."""

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]: ...

    def requeue(self, groups: Sequence[PendingGroup]) -> None: ...

    @property
    def num_waiting(self) -> int: ...


class Generation(Protocol):
    """How the groups of one rollout grow."""

    late: int  # groups that a time limit cut short

    def start(self, groups: Sequence[PendingGroup]) -> None:
        """Continue these groups, with those that are in progress."""
        ...

    def wait(self) -> list[PendingGroup]:
        """Groups that have ended since, graded, by rising id; perhaps none yet."""
        ...

    def stop(self) -> list[PendingGroup]:
        """No more tokens; the groups that have not ended, with what they have."""
        ...


class RoundGeneration:
    """Rounds that all ranks take together: all unfinished responses grow, by a slice or to their
    end."""

    def __init__(
        self, rollouter: Rollouter, sampling: SamplingParams, slice_len: int | None
    ) -> None:
        self.late = 0
        self._rollouter = rollouter
        self._sampling = sampling
        self._slice_len = slice_len
        self._groups: list[PendingGroup] = []

    def start(self, groups: Sequence[PendingGroup]) -> None:
        self._groups += groups

    def wait(self) -> list[PendingGroup]:
        """One round; a collective."""
        unfinished = [s for group in self._groups for s in group.samples if not s.ended]
        if unfinished:
            continued = self._rollouter.continue_generation(
                unfinished, self._sampling, limit=self._slice_len
            )
            by_id = {s.sample_id: s for s in continued}
            self._groups = [
                g.with_samples([by_id.get(s.sample_id, s) for s in g.samples]) for g in self._groups
            ]
        ended = sorted((g for g in self._groups if g.ended), key=lambda g: g.group_id)
        self._groups = [g for g in self._groups if not g.ended]
        graded = self._rollouter.grade_groups([g.samples for g in ended])
        return [g.with_samples(samples) for g, samples in zip(ended, graded, strict=True)]

    def stop(self) -> list[PendingGroup]:
        return self._groups


class Collector:
    """Collects the rollouts of a run. All ranks call it together and know the same groups;
    functions of the user's run on rank 0 alone, which is given all samples that they see."""

    def __init__(
        self,
        config: RunConfig,
        rollouter: Rollouter,
        buffer: GroupSource,
        sampling: SamplingParams,
        filters: GroupFilters,
        *,
        streams: bool = False,
    ) -> None:
        """
        Args:
            config: The run's.
            rollouter: Samples and grades.
            buffer: A `GroupBuffer`, unless `collect_from` is all that is called.
            sampling: Of training.
            filters: See `hooks.group_filters`.
            streams: Ask request by request on rank 0, in place of rounds.
        """
        self.config = config.scheduling
        self.target = config.rollout.rollout_batch_size
        self.draw_size = config.scheduling.over_sampling_batch_size or self.target
        self.slice_len = slice_length(config)
        self.rollouter = rollouter
        self.buffer = buffer
        self.sampling = sampling
        self.filters = filters
        self.streams = streams
        self._on_rank_zero = DecideOnRankZero(rollouter)

    def collect(self, rollout_id: int) -> Collected:
        """The groups of a rollout; a collective.

        Args:
            rollout_id: Counted from 0.

        Returns:
            --rollout-batch-size groups, known on all ranks.

        Raises:
            RunError: --max-num-gen-batches draws brought too few, or streaming took too long.
            ValueError: a user's function is wrong.
        """
        if self.streams:
            return self._collect_on_rank_zero(rollout_id)
        generation = RoundGeneration(self.rollouter, self.sampling, self.slice_len)
        return self.collect_from(generation, rollout_id, self._on_rank_zero)

    def collect_from(self, generation: Generation, rollout_id: int, decide: Decide) -> Collected:
        """The loop of `collect`.

        Args:
            generation: How groups grow.
            rollout_id: Counted from 0.
            decide: Calls the functions of filters; where all ranks run this loop, on rank 0.
        """
        stats, kept = CollectionStats(), list[PendingGroup]()
        in_progress = 0  # groups that were drawn for this rollout and not dropped
        while len(kept) < self.target:
            while in_progress < self.target:
                if stats.draws == self.config.max_num_gen_batches:
                    raise RunError(self._too_few(rollout_id, stats, len(kept)))
                groups = self._draw(rollout_id, stats, decide)
                generation.start(groups)
                in_progress += len(groups)
            ended = generation.wait()
            verdicts = self._verdicts(stats, ended, in_progress, decide)
            for group, keep in zip(ended, verdicts, strict=True):
                if not keep:
                    in_progress -= 1
                    stats.wasted_tokens += group.response_tokens
                elif len(kept) < self.target:
                    kept.append(group)
                else:
                    self._set_aside(group, stats)
        self._leave(generation.stop(), rollout_id, stats)
        stats.late = generation.late
        kept.sort(key=lambda g: g.group_id)
        kept = self._without_removed(kept, decide)
        complete_groups = [SampleGroup(g.group_id, g.samples) for g in kept]
        metrics = stats.metrics(kept=len(kept), waiting=self.buffer.num_waiting)
        return Collected(
            complete_groups, [g.prompt for g in kept], metrics if schedules(self.config) else {}
        )

    def _collect_on_rank_zero(self, rollout_id: int) -> Collected:
        """Rank 0 collects and keeps the samples and what waits; all ranks get the index of the
        samples, and the position of the prompts."""
        buffer, rollouter = self.buffer, self.rollouter
        assert isinstance(buffer, GroupBuffer)
        own: Collected | None = None

        def work() -> Any:
            nonlocal own
            responder = Responder(rollouter, rollouter.engine, self.sampling)
            with StreamGeneration(responder, self.config.rollout_time_limit_s) as generation:
                own = self.collect_from(generation, rollout_id, decide_here)
            return index_of_groups(own.groups), own.metrics, buffer.source.state_dict()

        timeout_s = self.config.rollout_function_timeout_s
        index, metrics, position = from_rank_zero_within(
            work,
            rollouter.group,
            timeout_s=timeout_s,
            late=f"rollout {rollout_id + 1} took longer than --rollout-function-timeout-s "
            f"{timeout_s:g}",
        )
        if own is not None:
            return own
        buffer.source.load_state_dict(position)
        buffer.waiting = []  # rank 0 has them
        return Collected(groups_of_index(index), [], metrics)

    def _draw(self, rollout_id: int, stats: CollectionStats, decide: Decide) -> list[PendingGroup]:
        """The next groups to sample: those that wait, then new prompts."""

        def choose(waiting: Groups, count: int) -> tuple[list[int], list[int]]:
            chooses = self.filters.choose_waiting
            if chooses is oldest_first:
                return oldest_first(rollout_id, waiting, count)
            return decide(lambda whole: chooses(rollout_id, whole, count), waiting)

        groups, discarded = self.buffer.take(self.draw_size, choose)
        stats.draws += 1
        stats.drawn += len(groups)
        stats.resumed += sum(any(s.response_length for s in g.samples) for g in groups)
        stats.discarded += len(discarded)
        stats.wasted_tokens += sum(g.response_tokens for g in discarded)
        if self.config.mask_offpolicy_in_partial_rollout:
            stats.masked_tokens += sum(s.active_tokens for g in groups for s in g.samples)
            groups = [g.with_samples(map(untrained, g.samples)) for g in groups]
        return groups

    def _verdicts(
        self,
        stats: CollectionStats,
        ended: Sequence[PendingGroup],
        in_progress: int,
        decide: Decide,
    ) -> list[bool]:
        """Whether the dynamic filter keeps each of the groups; the dropped ones are counted."""
        keep_group = self.filters.keep_group
        if keep_group is None:
            return [True] * len(ended)

        def judge(groups: Groups) -> tuple[list[bool], Counter[str]]:
            left, verdicts, dropped = in_progress, list[bool](), Counter[str]()
            for group in groups:
                is_spare = left > self.target
                verdicts.append(is_kept(keep_group, group.samples, dropped, is_spare=is_spare))
                left -= not verdicts[-1]
            return verdicts, dropped

        reads_rewards_only = keep_group in BUILT_IN_FILTERS.values()
        verdicts, dropped = judge(ended) if reads_rewards_only else decide(judge, ended)
        stats.dropped += dropped
        return list(verdicts)

    def _set_aside(self, group: PendingGroup, stats: CollectionStats) -> None:
        """A good group that ended when there were enough: the next rollout takes it, as it would
        be trained on there completely."""
        if self.config.partial_rollout and not self.config.mask_offpolicy_in_partial_rollout:
            self.buffer.requeue([group])
            return
        stats.surplus += 1
        stats.wasted_tokens += group.response_tokens

    def _leave(
        self, groups: Sequence[PendingGroup], rollout_id: int, stats: CollectionStats
    ) -> None:
        """What is not finished: kept for the next rollout, or lost."""
        if not self.config.partial_rollout:
            stats.lost += len(groups)
            stats.wasted_tokens += sum(g.response_tokens for g in groups)
            return

        def marked(sample: AnySample) -> AnySample:
            if isinstance(sample, RemoteSample) or not sample.response_length:
                return sample
            return replace(sample, metadata={"start_rollout_id": rollout_id, **sample.metadata})

        self.buffer.requeue([g.with_samples(map(marked, g.samples)) for g in groups])

    def _without_removed(self, groups: list[PendingGroup], decide: Decide) -> list[PendingGroup]:
        """With an empty mask where --rollout-sample-filter-path removes a sample."""
        removed_samples = self.filters.removed_samples
        if removed_samples is None:
            return groups

        def find(whole: Groups) -> list[int]:
            complete = [SampleGroup(group.group_id, group.samples) for group in whole]
            return list(removed_samples(complete))

        removed = set(decide(find, groups))
        return [
            g.with_samples(untrained(s) if s.sample_id in removed else s for s in g.samples)
            for g in groups
        ]

    def _too_few(self, rollout_id: int, stats: CollectionStats, kept: int) -> str:
        """The message when --max-num-gen-batches draws did not bring enough groups."""
        counts = [f"{reason} {count}" for reason, count in stats.dropped.most_common()]
        return (
            f"rollout {rollout_id + 1}: {stats.draws} draws of {self.draw_size} prompts "
            f"(--max-num-gen-batches) brought {kept} of the {self.target} groups that "
            f"--rollout-batch-size asks for; dropped by {DYNAMIC_FILTER} "
            f"{self.config.dynamic_sampling_filter_path}, by reason: "
            f"{', '.join(counts) or 'none'}. Give easier or harder prompts, another filter, or a "
            "larger --over-sampling-batch-size"
        )


def schedules(config: Any) -> bool:
    """Whether a drawn group may be anything but kept and finished in its rollout."""
    return (
        config.over_sampling_batch_size is not None
        or config.dynamic_sampling_filter_path is not None
        or config.partial_rollout
        or config.rollout_time_limit_s is not None
    )


def slice_length(config: RunConfig) -> int | None:
    """Tokens of a round; None: to the end."""
    if config.scheduling.rollout_slice_len is not None or not config.scheduling.partial_rollout:
        return config.scheduling.rollout_slice_len
    return max(1, config.rollout.rollout_max_response_len // 8)
