"""Collect the groups of one rollout: draw prompts, sample and filter until there are enough.
Unfinished groups wait for the next rollout or are dropped.

The loop is the same for every engine; a `Generation` does the sampling. `RoundGeneration` works in
synchronous rounds over all ranks: which groups are kept depends only on lengths and rewards, not on
timing or layout. `streaming.py` sends single requests from rank 0 and aborts surplus ones on the
servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from slime_like.data.group_buffer import Choose, GroupBuffer, PendingGroup, oldest_first
from slime_like.distributed.collectives import from_rank_zero, from_rank_zero_within
from slime_like.engines.base import SamplingParams
from slime_like.errors import RunError
from slime_like.rollout.failures import (
    LEFT_OUT,
    LEFT_OUT_FAILED,
    check_failed,
    describe_failure,
    is_failed,
    num_failed,
)
from slime_like.rollout.filters import BUILT_IN_FILTERS, DYNAMIC_FILTER, GroupFilters, is_kept
from slime_like.rollout.rollouter import Rollouter
from slime_like.rollout.shared_groups import gather_pending, groups_of_index, index_of_groups
from slime_like.rollout.streaming import Responder, StreamGeneration
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.samples.index import AnySample, RemoteSample, untrained
from slime_like.types import Prompt

if TYPE_CHECKING:
    from arguments.schema import RolloutConfig, SchedulingConfig
    from slime_like.rollout.shared_groups import GroupIndex


T = TypeVar("T")
Groups = Sequence[PendingGroup]


class Decide(Protocol):
    """Calls a user function on the rank where it runs, and returns its result on all ranks."""

    def __call__(self, function: Callable[[Groups], T], groups: Groups) -> T:
        """function: called with the groups, including the tokens of all their samples."""
        ...


def decide_locally(function: Callable[[Groups], T], groups: Groups) -> T:
    """A `Decide` for collection on a single rank that holds all samples."""
    return function(groups)


@dataclass(frozen=True, slots=True)
class Collected:
    """A collected rollout: groups by ascending id, their prompts (if known on this rank), and
    metrics of the collection."""

    groups: list[SampleGroup]
    prompts: list[Prompt]
    metrics: dict[str, float]


@dataclass(slots=True)
class CollectionStats:
    """Counts of groups, unless the name states another unit."""

    draws: int = 0  # draws of prompts
    drawn: int = 0
    resumed: int = 0  # groups continued from an earlier rollout
    surplus: int = 0  # complete groups beyond the target
    lost: int = 0  # unfinished when the target was reached
    discarded: int = 0  # by the buffer filter
    late: int = 0  # truncated by --rollout-time-limit-s
    wasted_tokens: int = 0  # sampled and thrown away
    masked_tokens: int = 0  # sampled in earlier rollouts and not trained on
    drawn_samples: int = 0  # samples of the drawn groups
    # graded samples of groups that are dropped or surplus, of which left_out_failed failed
    left_out: int = 0
    left_out_failed: int = 0
    first_failed: PendingGroup | None = None  # the first such group
    dropped: Counter[str] = field(default_factory=Counter)  # by the dynamic filter, by reason

    def metrics(self, *, kept: int, waiting: int) -> dict[str, float]:
        """Metrics to log.

        Args:
            kept: Groups of this rollout.
            waiting: Groups left for the next.
        """
        counts = {
            "groups_drawn": self.drawn,
            "groups_resumed": self.resumed,
            "groups_kept": kept,
            "groups_dropped": self.dropped.total(),
            "groups_surplus": self.surplus,
            "groups_lost": self.lost,
            "groups_waiting": waiting,
            "groups_discarded": self.discarded,
            "groups_late": self.late,
            "draws": self.draws,
            "wasted_tokens": self.wasted_tokens,
            "off_policy_masked_tokens": self.masked_tokens,
        }
        for reason, count in sorted(self.dropped.items()):
            counts[f"dynamic_filter/drop_{reason}"] = count
        metrics = {f"rollout/{name}": float(count) for name, count in counts.items()}
        return metrics | {LEFT_OUT: self.left_out, LEFT_OUT_FAILED: self.left_out_failed}

    def leave_out(self, group: PendingGroup) -> None:
        """Count a graded group that is not trained on."""
        failed = num_failed(group.samples)
        self.wasted_tokens += group.response_tokens
        self.left_out += len(group.samples)
        self.left_out_failed += failed
        if failed and self.first_failed is None:
            self.first_failed = group


class GroupSource(Protocol):
    """Groups are drawn from here, and unfinished ones returned: a `GroupBuffer`, or a user's."""

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]: ...

    def requeue(self, groups: Sequence[PendingGroup]) -> None: ...

    def observe(self, groups: Sequence[PendingGroup]) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    @property
    def num_waiting(self) -> int: ...


class Generation(Protocol):
    """Generates the responses of one rollout's groups."""

    late: int  # groups truncated by a time limit

    def start(self, groups: Sequence[PendingGroup]) -> None:
        """Start generating these groups, in addition to those in progress."""
        ...

    def wait(self) -> list[PendingGroup]:
        """Newly finished groups, graded, by ascending id; may be empty."""
        ...

    def stop(self) -> list[PendingGroup]:
        """Stop generating. Returns the unfinished groups with their partial responses."""
        ...


class RoundGeneration:
    """Generates in synchronous rounds over all ranks: each round extends every unfinished response
    by a slice of tokens, or to its end."""

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
        """Run one round. Collective."""
        samples = flatten(group.sample_group for group in self._groups)
        unfinished = [s for s in samples if not s.ended]
        if unfinished:
            continued = self._rollouter.continue_generation(
                unfinished, self._sampling, limit=self._slice_len
            )
            by_id = {s.sample_id: s for s in continued}
            for i, group in enumerate(self._groups):
                current = [by_id.get(s.sample_id, s) for s in group.samples]
                self._groups[i] = group.with_samples(current)
        ended = sorted((g for g in self._groups if g.ended), key=lambda g: g.group_id)
        self._groups = [g for g in self._groups if not g.ended]
        graded = self._rollouter.grade_groups([g.samples for g in ended])
        return [g.with_samples(samples) for g, samples in zip(ended, graded, strict=True)]

    def stop(self) -> list[PendingGroup]:
        return self._groups

    @property
    def unfinished(self) -> list[PendingGroup]:
        """The groups in progress, in the order of their start."""
        return self._groups


class Collector:
    """Collects the rollouts of a run. Collective: all ranks get the same groups. User functions run
    on rank 0 only, which receives all samples that they are given."""

    def __init__(
        self,
        scheduling: SchedulingConfig,
        rollout: RolloutConfig,
        rollouter: Rollouter,
        buffer: GroupSource,
        sampling: SamplingParams,
        filters: GroupFilters,
        *,
        max_failed: float,
        streams: bool = False,
    ) -> None:
        """
        Args:
            scheduling: What is drawn, kept and carried over.
            rollout: Has the number of groups of a rollout.
            rollouter: Samples and grades.
            buffer: A `GroupBuffer`, unless `collect_from` is all that is called.
            sampling: Sampling parameters of training.
            filters: See `hooks.group_filters`.
            max_failed: Fraction of samples that may fail (--max-failed-samples).
            streams: Send single requests from rank 0 instead of synchronous rounds.
        """
        self.config = scheduling
        self.target = rollout.rollout_batch_size
        self.max_failed = max_failed
        self.draw_size = scheduling.over_sampling_batch_size or self.target
        self.slice_len = slice_length(scheduling, rollout)
        self.rollouter = rollouter
        self.buffer = buffer
        self.sampling = sampling
        self.filters = filters
        self.streams = streams

    def collect(self, rollout_id: int) -> Collected:
        """Collect the groups of a rollout. Collective.

        Args:
            rollout_id: Counted from 0.

        Returns:
            --rollout-batch-size groups, known on all ranks.

        Raises:
            RunError: --max-num-gen-batches draws gave too few groups, or streaming timed out.
            ValueError: A user function returned something invalid.
        """
        if self.streams:
            return self._collect_on_rank_zero(rollout_id)
        generation = RoundGeneration(self.rollouter, self.sampling, self.slice_len)
        return self.collect_from(generation, rollout_id, self._decide_on_rank_zero)

    def collect_from(self, generation: Generation, rollout_id: int, decide: Decide) -> Collected:
        """The loop of `collect`.

        Args:
            generation: Generates the responses.
            rollout_id: Counted from 0.
            decide: Calls filter functions; on rank 0 if all ranks run this loop.
        """
        stats = CollectionStats()
        kept = list[PendingGroup]()
        in_progress = 0  # groups drawn for this rollout and not dropped
        while len(kept) < self.target:
            while in_progress < self.target:
                if stats.draws:
                    self._check_failed(rollout_id, stats, kept, decide, ended=False)
                if stats.draws == self.config.max_num_gen_batches:
                    raise RunError(self._insufficient_message(rollout_id, stats, len(kept)))
                groups = self._draw(rollout_id, stats, decide)
                generation.start(groups)
                in_progress += len(groups)
            ended = generation.wait()
            verdicts = self._apply_filter(stats, ended, in_progress, decide)
            for group, keep in zip(ended, verdicts, strict=True):
                if not keep:
                    in_progress -= 1
                    stats.leave_out(group)
                    self.buffer.observe([group])
                elif len(kept) < self.target:
                    kept.append(group)
                else:
                    self._requeue_surplus(group, stats)
        self._requeue_unfinished(generation.stop(), rollout_id, stats)
        stats.late = generation.late
        self._check_failed(rollout_id, stats, kept, decide, ended=True)
        kept = sorted(kept, key=lambda g: g.group_id)
        self.buffer.observe(kept)
        kept = self._mask_removed(kept, decide)
        metrics = self.buffer.metrics()
        if schedules(self.config):
            metrics |= stats.metrics(kept=len(kept), waiting=self.buffer.num_waiting)
        return Collected([g.sample_group for g in kept], [g.prompt for g in kept], metrics)

    def _decide_on_rank_zero(self, function: Callable[[Groups], T], groups: Groups) -> T:
        """A `Decide` for collection on all ranks: the function runs on rank 0."""
        complete_groups = gather_pending(groups, self.rollouter.gather)
        return from_rank_zero(lambda: function(complete_groups), self.rollouter.group)

    def _collect_on_rank_zero(self, rollout_id: int) -> Collected:
        """Collect by requests of rank 0."""

        def collect() -> Collected:
            responder = Responder(self.rollouter, self.rollouter.engine, self.sampling)
            with StreamGeneration(responder, self.config.rollout_time_limit_s) as generation:
                return self.collect_from(generation, rollout_id, decide_locally)

        return self._share_from_rank_zero(rollout_id, collect)

    def _share_from_rank_zero(
        self, rollout_id: int, collect_on_rank_zero: Callable[[], Collected]
    ) -> Collected:
        """What rank 0 collects. It holds the samples and waiting groups; all ranks get the sample
        index and the prompt position."""
        buffer = self.buffer
        rollouter = self.rollouter
        assert isinstance(buffer, GroupBuffer)
        collected: Collected | None = None

        def collect() -> tuple[GroupIndex, dict[str, float], Mapping[str, object]]:
            nonlocal collected
            collected = collect_on_rank_zero()
            return index_of_groups(collected.groups), collected.metrics, self._source_state()

        timeout_s = self.config.rollout_function_timeout_s
        index, metrics, position = from_rank_zero_within(
            collect,
            rollouter.group,
            timeout_s=timeout_s,
            late=f"rollout {rollout_id + 1} took longer than --rollout-function-timeout-s "
            f"{timeout_s:g}",
        )
        if collected is not None:
            return collected
        buffer.source.load_state_dict(position)
        buffer.waiting = []  # held by rank 0
        return Collected(groups_of_index(index), [], metrics)

    def _source_state(self) -> Mapping[str, object]:
        """The prompt position, on rank 0."""
        assert isinstance(self.buffer, GroupBuffer)
        return self.buffer.source.state_dict()

    def _draw(self, rollout_id: int, stats: CollectionStats, decide: Decide) -> list[PendingGroup]:
        """The next groups to sample: waiting groups first, then new prompts."""

        def choose(waiting: Groups, count: int) -> tuple[list[int], list[int]]:
            choose_waiting = self.filters.choose_waiting
            if choose_waiting is oldest_first:
                return oldest_first(rollout_id, waiting, count)
            return decide(
                lambda complete_groups: choose_waiting(rollout_id, complete_groups, count), waiting
            )

        groups, discarded = self.buffer.take(self.draw_size, choose)
        stats.draws += 1
        stats.drawn += len(groups)
        stats.drawn_samples += sum(len(group.samples) for group in groups)
        stats.resumed += sum(any(s.response_length for s in g.samples) for g in groups)
        stats.discarded += len(discarded)
        stats.wasted_tokens += sum(g.response_tokens for g in discarded)
        if self.config.mask_offpolicy_in_partial_rollout:
            samples = flatten(group.sample_group for group in groups)
            stats.masked_tokens += sum(s.active_tokens for s in samples)
            groups = [g.with_samples(map(untrained, g.samples)) for g in groups]
        return groups

    def _apply_filter(
        self,
        stats: CollectionStats,
        ended: Sequence[PendingGroup],
        in_progress: int,
        decide: Decide,
    ) -> list[bool]:
        """Apply the dynamic filter: whether each group is kept. Dropped groups are counted."""
        keep_group = self.filters.keep_group
        if keep_group is None:
            return [True] * len(ended)

        def judge(groups: Groups) -> tuple[list[bool], Counter[str]]:
            verdicts = list[bool]()
            dropped = Counter[str]()
            for group in groups:
                is_spare = in_progress - verdicts.count(False) > self.target
                verdicts.append(is_kept(keep_group, group.samples, dropped, is_spare=is_spare))
            return verdicts, dropped

        if keep_group in BUILT_IN_FILTERS.values():  # these read rewards only
            decide = decide_locally
        verdicts, dropped = decide(judge, ended)
        stats.dropped += dropped
        return verdicts

    def _requeue_surplus(self, group: PendingGroup, stats: CollectionStats) -> None:
        """Keep a surplus group for the next rollout, where all of it would be trained on."""
        if self.config.partial_rollout and not self.config.mask_offpolicy_in_partial_rollout:
            self.buffer.requeue([group])
            return
        stats.surplus += 1
        stats.leave_out(group)
        self.buffer.observe([group])

    def _requeue_unfinished(
        self, groups: Sequence[PendingGroup], rollout_id: int, stats: CollectionStats
    ) -> None:
        """Keep unfinished groups for the next rollout, or drop them."""
        if not self.config.partial_rollout:
            stats.lost += len(groups)
            stats.wasted_tokens += sum(g.response_tokens for g in groups)
            return

        def mark_start(sample: AnySample) -> AnySample:
            if isinstance(sample, RemoteSample) or not sample.response_length:
                return sample
            return replace(sample, metadata={"start_rollout_id": rollout_id, **sample.metadata})

        self.buffer.requeue([g.with_samples(map(mark_start, g.samples)) for g in groups])

    def _check_failed(
        self, rollout_id: int, stats: CollectionStats, kept: Groups, decide: Decide, *, ended: bool
    ) -> None:
        """Stop the run if too many samples failed, counting those of groups that are left out;
        those of kept groups alone are checked by the trainer. ended: no more groups are drawn, so
        that fewer failures are worth a warning."""
        first = stats.first_failed
        if first is None:
            return

        def describe(groups: Groups) -> str:
            failed = next(s for s in complete(groups[0].samples) if is_failed(s))
            return f"{describe_failure(failed)} (of a group that is not trained on)"

        failed = stats.left_out_failed
        kept_samples = 0
        for group in kept:
            failed += num_failed(group.samples)
            kept_samples += len(group.samples)
        fraction = failed / (stats.left_out + kept_samples if ended else stats.drawn_samples)
        if ended or fraction > self.max_failed:
            check_failed(rollout_id, fraction, self.max_failed, lambda: decide(describe, [first]))

    def _mask_removed(self, groups: list[PendingGroup], decide: Decide) -> list[PendingGroup]:
        """Mask out the samples that --rollout-sample-filter-path removes."""
        removed_samples = self.filters.removed_samples
        if removed_samples is None:
            return groups

        def find_removed(complete_groups: Groups) -> list[int]:
            return list(removed_samples([group.sample_group for group in complete_groups]))

        removed = set(decide(find_removed, groups))

        def mask_if_removed(sample: AnySample) -> AnySample:
            return untrained(sample) if sample.sample_id in removed else sample

        return [group.with_samples(map(mask_if_removed, group.samples)) for group in groups]

    def _insufficient_message(self, rollout_id: int, stats: CollectionStats, kept: int) -> str:
        """The error message when --max-num-gen-batches draws gave too few groups."""
        counts = [f"{reason} {count}" for reason, count in stats.dropped.most_common()]
        return (
            f"rollout {rollout_id + 1}: {stats.draws} draws of {self.draw_size} prompts "
            f"(--max-num-gen-batches) gave {kept} of {self.target} groups (--rollout-batch-size); "
            f"dropped by {DYNAMIC_FILTER} {self.config.dynamic_sampling_filter_path}, by reason: "
            f"{', '.join(counts) or 'none'}. Use easier or harder prompts, another filter, or a "
            "larger --over-sampling-batch-size"
        )


def schedules(config: SchedulingConfig) -> bool:
    """Whether the run filters, over-samples or carries over groups."""
    sizes = (config.over_sampling_batch_size, config.rollout_time_limit_s)
    has_filter = config.dynamic_sampling_filter_path is not None
    return config.partial_rollout or has_filter or sizes != (None, None)


def slice_length(scheduling: SchedulingConfig, rollout: RolloutConfig) -> int | None:
    """Tokens per round; None: generate to the end."""
    continues = scheduling.partial_rollout or scheduling.fully_async
    if scheduling.rollout_slice_len is not None or not continues:
        return scheduling.rollout_slice_len
    return max(1, rollout.rollout_max_response_len // 8)
