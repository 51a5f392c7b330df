"""Work of rank 0 for all ranks: read groups, call user functions and write checkpoints. It gathers
the samples for this; the other ranks get the sample index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from slime_like.data.prompts import PendingGroup
from slime_like.distributed.collectives import from_rank_zero
from slime_like.rollout.async_rollout import RolloutJson
from slime_like.rollout.group_rows import groups_from_rows, groups_to_rows, waiting_to_rows
from slime_like.rollout.rollouter import Rollouter
from slime_like.sample_index import AnySample, Rows, Versions, holder_of, remote_samples, rows_of
from slime_like.types import SampleGroup, complete

if TYPE_CHECKING:
    from slime_like.checkpoints.state import SamplingState


T = TypeVar("T")
Groups = Sequence[PendingGroup]
Whole = Callable[[Sequence[AnySample]], list[AnySample]]  # brings samples to rank 0


def index_of_groups(groups: Sequence[SampleGroup]) -> tuple[list[int], Rows, Versions]:
    """Index of groups held by rank 0: group sizes, and metadata rows of the samples."""
    samples = complete(s for group in groups for s in group.samples)
    return [len(group.samples) for group in groups], *rows_of(samples, 0)


def groups_of_index(index: tuple[list[int], Rows, Versions]) -> list[SampleGroup]:
    """Rebuild the groups from `index_of_groups`, on the other ranks."""
    sizes, rows, versions = index
    every = iter(remote_samples(rows, versions))
    members = [tuple(next(every) for _ in range(size)) for size in sizes]
    return [SampleGroup(samples[0].group_id, samples) for samples in members]


def from_one_rank(find: Callable[[], list[SampleGroup]]) -> list[SampleGroup]:
    """Groups that rank 0 reads and holds; all ranks get their index."""
    own: list[SampleGroup] = []

    def work() -> tuple[list[int], Rows, Versions]:
        own.extend(find())
        return index_of_groups(own)

    index = from_rank_zero(work)
    return own or groups_of_index(index)


def whole_groups(groups: Sequence[SampleGroup], whole: Whole) -> list[SampleGroup]:
    """The groups with complete samples on rank 0. whole: gathers samples there."""
    every = iter(whole([s for group in groups for s in group.samples]))
    return [
        SampleGroup(group.group_id, tuple(next(every) for _ in group.samples)) for group in groups
    ]


def whole_pending(groups: Groups, whole: Whole) -> list[PendingGroup]:
    """Like `whole_groups`, for pending groups."""
    every = iter(whole([s for group in groups for s in group.samples]))
    return [group.with_samples([next(every) for _ in group.samples]) for group in groups]


class DecideOnRankZero:
    """A `Decide` for collection on all ranks: the function runs on rank 0."""

    def __init__(self, rollouter: Rollouter) -> None:
        self._rollouter = rollouter

    def __call__(self, function: Callable[[Groups], T], groups: Groups) -> T:
        found = whole_pending(groups, self._rollouter.whole)
        return from_rank_zero(lambda: function(found), self._rollouter.group)


@dataclass(frozen=True, slots=True)
class SamplingPosition:
    """Position of sampling: prompt position and waiting groups."""

    data: Mapping[str, object]
    waiting: tuple[PendingGroup, ...]


class RankZeroJson(RolloutJson):
    """Rank 0 gathers all samples and writes. All ranks read; rank 0 holds the prefetched groups."""

    def __init__(self, rollouter: Rollouter) -> None:
        self._whole = rollouter.whole

    def groups_to_rows(self, groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
        found = whole_groups(groups, self._whole)
        return groups_to_rows(found) if dist.get_rank() == 0 else []

    def groups_from_rows(self, rows: Sequence[Mapping[str, object]]) -> list[SampleGroup]:
        groups = groups_from_rows(rows)
        return groups if dist.get_rank() == 0 else groups_of_index(index_of_groups(groups))

    def position_to_row(self, position: SamplingPosition) -> SamplingState:
        rank = dist.get_rank()
        holders = [[holder_of(s, rank) for s in group.samples] for group in position.waiting]
        waiting = whole_pending(position.waiting, self._whole)
        rows = waiting_to_rows(waiting, holders) if rank == 0 else []
        return {"data": position.data, "waiting_groups": rows}
