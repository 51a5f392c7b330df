"""A rollout's groups, collected: prompts are drawn, sampled and filtered until there are enough;
the rest waits for the next rollout or is lost.

With the engine inside the ranks everything happens in rounds that all ranks take together: all
unfinished responses grow, by a slice or to their end, and then it is looked which groups have
ended. So what is kept depends on lengths and rewards alone, not on time, ranks or layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from arguments.run_config import RunConfig
from slime_like.compat.slime.samples import slime_args, to_slime_groups
from slime_like.distributed.collectives import from_rank_zero
from slime_like.errors import RunError
from slime_like.rollout.collection_stats import CollectionStats
from slime_like.rollout.engines.base import SamplingParams
from slime_like.rollout.filters import DynamicFilter, choose_waiting, samples_to_remove
from slime_like.rollout.group_buffer import GroupBuffer, PendingGroup
from slime_like.rollout.rollouter import Rollouter
from slime_like.types import Prompt, Sample, SampleGroup


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of a rollout by rising id, their prompts, and numbers about how they were found."""

    groups: list[SampleGroup]
    prompts: list[Prompt]
    metrics: dict[str, float]


@dataclass(slots=True)
class _Tally(CollectionStats):
    """discarded: groups that the buffer's filter threw away. masked_tokens: of earlier rollouts,
    not trained on."""

    discarded: int = 0
    masked_tokens: int = 0


class Collector:
    """Collects rollouts of a run. All ranks hold the same buffer and make the same calls; functions
    of the user's run on rank 0 alone."""

    def __init__(
        self, run: RunConfig, rollouter: Rollouter, buffer: GroupBuffer, sampling: SamplingParams
    ) -> None:
        self.config = run.scheduling
        self.target = run.rollout.rollout_batch_size
        self.draw_size = run.scheduling.over_sampling_batch_size or self.target
        self.slice_len = slice_length(run)
        self.rollouter = rollouter
        self.buffer = buffer
        self.sampling = sampling
        self.args = slime_args(run)

    def collect(self, rollout_id: int) -> Collected:
        """As many groups as --rollout-batch-size says. Raises RunError when --max-num-gen-batches
        draws do not bring them, telling what was dropped, and why."""
        tally, kept = _Tally(), list[PendingGroup]()
        chosen = DynamicFilter(self.config.dynamic_sampling_filter_path, self.args)
        open_groups: list[PendingGroup] = []
        under_way = 0  # groups that were drawn for this rollout and not dropped
        while len(kept) < self.target:
            while under_way < self.target:
                if tally.draws == self.config.max_num_gen_batches:
                    raise RunError(
                        tally.too_few(
                            rollout_id,
                            chosen,
                            kept=len(kept),
                            wanted=self.target,
                            draw_size=self.draw_size,
                        )
                    )
                open_groups += self._draw(rollout_id, tally)
                under_way += self.draw_size
            open_groups = self._grow(open_groups)
            ended = sorted((g for g in open_groups if g.ended), key=lambda g: g.group_id)
            open_groups = [g for g in open_groups if not g.ended]
            graded = self.rollouter.grade_groups([g.samples for g in ended])
            ended = [
                PendingGroup(g.prompt, tuple(samples))
                for g, samples in zip(ended, graded, strict=True)
            ]
            for group, keep in zip(ended, self._verdicts(chosen, ended, under_way), strict=True):
                if not keep:
                    under_way -= 1
                    tally.wasted_tokens += group.response_tokens
                elif len(kept) < self.target:
                    kept.append(group)
                else:
                    self._set_aside(group, tally)
        self._leave(open_groups, rollout_id, tally)
        kept.sort(key=lambda g: g.group_id)
        groups = self._without_removed([SampleGroup(g.group_id, g.samples) for g in kept])
        return Collected(groups, [g.prompt for g in kept], self._metrics(tally, chosen, len(kept)))

    def _draw(self, rollout_id: int, tally: _Tally) -> list[PendingGroup]:
        """The next groups to sample: those that wait, then new prompts."""

        def choose(waiting: list[PendingGroup], count: int) -> tuple[list[int], list[int]]:
            return from_rank_zero(
                lambda: choose_waiting(
                    self.config.buffer_filter_path, self.args, rollout_id, waiting, count
                ),
                self.rollouter.group,
            )

        groups, discarded = self.buffer.take(self.draw_size, choose)
        tally.draws += 1
        tally.drawn += len(groups)
        tally.resumed += sum(any(s.response_length for s in g.samples) for g in groups)
        tally.discarded += len(discarded)
        tally.wasted_tokens += sum(g.response_tokens for g in discarded)
        if self.config.mask_offpolicy_in_partial_rollout:
            tally.masked_tokens += sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
            groups = [
                PendingGroup(
                    g.prompt,
                    tuple(replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in g.samples),
                )
                for g in groups
            ]
        return groups

    def _grow(self, groups: Sequence[PendingGroup]) -> list[PendingGroup]:
        """One round: what has not ended goes on."""
        unfinished = [sample for group in groups for sample in group.samples if not sample.ended]
        if not unfinished:
            return list(groups)
        grown = {
            s.sample_id: s
            for s in self.rollouter.extend(unfinished, self.sampling, limit=self.slice_len)
        }
        return [
            PendingGroup(g.prompt, tuple(grown.get(s.sample_id, s) for s in g.samples))
            for g in groups
        ]

    def _verdicts(
        self, chosen: DynamicFilter, ended: Sequence[PendingGroup], under_way: int
    ) -> list[bool]:
        """What the dynamic filter says of each group, decided on rank 0."""
        if self.config.dynamic_sampling_filter_path is None:
            return [True] * len(ended)

        def ask() -> tuple[list[bool], dict[str, int]]:
            left, verdicts = under_way, []
            for samples in to_slime_groups(g.samples for g in ended):
                verdicts.append(chosen.keeps(samples, is_spare=left > self.target))
                left -= not verdicts[-1]
            return verdicts, dict(chosen.dropped)

        verdicts, dropped = from_rank_zero(ask, self.rollouter.group)
        chosen.dropped.clear()
        chosen.dropped.update(dropped)
        return verdicts

    def _set_aside(self, group: PendingGroup, tally: _Tally) -> None:
        """A good group that ended when there were enough: it is the next rollout's, as it would be
        trained on there whole."""
        if self.config.partial_rollout and not self.config.mask_offpolicy_in_partial_rollout:
            self.buffer.requeue([group])
            return
        tally.surplus += 1
        tally.wasted_tokens += group.response_tokens

    def _leave(self, groups: Sequence[PendingGroup], rollout_id: int, tally: _Tally) -> None:
        """What is not finished: kept for the next rollout, or lost."""
        if not self.config.partial_rollout:
            tally.lost += len(groups)
            tally.wasted_tokens += sum(g.response_tokens for g in groups)
            return

        def marked(sample: Sample) -> Sample:
            metadata: dict[str, Any] = {"start_rollout_id": rollout_id, **sample.metadata}
            return replace(sample, metadata=metadata) if sample.response_length else sample

        self.buffer.requeue([PendingGroup(g.prompt, tuple(map(marked, g.samples))) for g in groups])

    def _without_removed(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        """With an empty mask where --rollout-sample-filter-path removes a sample."""
        path = self.config.rollout_sample_filter_path
        if path is None:
            return groups
        removed = set(
            from_rank_zero(
                lambda: samples_to_remove(
                    path, self.args, to_slime_groups(g.samples for g in groups)
                ),
                self.rollouter.group,
            )
        )

        def masked(sample: Sample) -> Sample:
            return (
                replace(sample, loss_mask=torch.zeros_like(sample.loss_mask))
                if sample.sample_id in removed
                else sample
            )

        return [SampleGroup(g.group_id, tuple(map(masked, g.samples))) for g in groups]

    def _metrics(self, tally: _Tally, chosen: DynamicFilter, kept: int) -> dict[str, float]:
        """Numbers of groups, and tokens that were sampled for nothing; only where something can
        become of a group but being kept."""
        if not schedules(self.config):
            return {}
        more = dict(groups_discarded=tally.discarded, off_policy_masked_tokens=tally.masked_tokens)
        metrics = tally.metrics(chosen.dropped, kept=kept, waiting=len(self.buffer.waiting), **more)
        return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def schedules(config: Any) -> bool:
    """Whether a drawn group may end otherwise than in its rollout."""
    return (
        config.over_sampling_batch_size is not None
        or config.dynamic_sampling_filter_path is not None
        or config.partial_rollout
    )


def slice_length(run: RunConfig) -> int | None:
    """Tokens of a round; None: to the end."""
    if run.scheduling.rollout_slice_len is not None or not run.scheduling.partial_rollout:
        return run.scheduling.rollout_slice_len
    return max(1, run.rollout.rollout_max_response_len // 8)
