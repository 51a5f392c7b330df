"""Work of rank 0 for all ranks: read groups, call user functions and write checkpoints. It gathers
the samples for this; the other ranks get the sample index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from slime_like.data.group_buffer import PendingGroup
from slime_like.distributed.collectives import from_rank_zero, is_rank_zero
from slime_like.rollout.async_rollout import RolloutJson
from slime_like.rollout.group_rows import groups_from_rows, groups_to_rows, waiting_to_rows
from slime_like.rollout.rollouter import Rollouter
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup, flatten, regroup, split
from slime_like.samples.index import AnySample, Rows, Versions, holder_of, remote_samples, rows_of

if TYPE_CHECKING:
    from slime_like.checkpoints.state import SamplingState


Groups = Sequence[PendingGroup]
GroupIndex = tuple[list[int], Rows, Versions]  # group sizes, and metadata of the samples
Gather = Callable[[Sequence[AnySample]], list[AnySample]]  # brings samples to rank 0


def index_of_groups(groups: Sequence[SampleGroup]) -> GroupIndex:
    """Index of groups held by rank 0."""
    return [len(group.samples) for group in groups], *rows_of(complete(flatten(groups)), 0)


def groups_of_index(index: GroupIndex) -> list[SampleGroup]:
    """Rebuild the groups from `index_of_groups`, on the other ranks."""
    sizes, rows, versions = index
    groups = split(remote_samples(rows, versions), sizes)
    return [SampleGroup(samples[0].group_id, samples) for samples in groups]


def share_from_rank_zero(load: Callable[[], list[SampleGroup]]) -> list[SampleGroup]:
    """Groups that rank 0 loads and holds; all ranks get their index."""
    local: list[SampleGroup] = []

    def load_index() -> GroupIndex:
        local.extend(load())
        return index_of_groups(local)

    index = from_rank_zero(load_index)
    return local or groups_of_index(index)


def gather_groups(groups: Sequence[SampleGroup], gather: Gather) -> list[SampleGroup]:
    """The groups with complete samples on rank 0. gather: collects samples there."""
    return regroup(groups, gather(flatten(groups)))


def gather_pending(groups: Groups, gather: Gather) -> list[PendingGroup]:
    """Like `gather_groups`, for pending groups."""
    gathered = gather_groups([group.sample_group for group in groups], gather)
    return [p.with_samples(g.samples) for p, g in zip(groups, gathered, strict=True)]


def held_by_rank_zero(groups: Groups) -> list[PendingGroup]:
    """Groups of which every rank holds all samples, because none has begun, as groups that rank 0
    alone holds."""
    if is_rank_zero() or not groups:
        return list(groups)
    held = groups_of_index(index_of_groups([group.sample_group for group in groups]))
    return [p.with_samples(g.samples) for p, g in zip(groups, held, strict=True)]


@dataclass(frozen=True, slots=True)
class SamplingPosition:
    """Position of sampling: prompt position and waiting groups."""

    data: Mapping[str, object]
    waiting: tuple[PendingGroup, ...]


class RankZeroJson(RolloutJson):
    """Rank 0 gathers all samples and writes. All ranks read; rank 0 holds the prefetched groups."""

    def __init__(self, rollouter: Rollouter) -> None:
        self._gather = rollouter.gather

    def groups_to_rows(self, groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
        complete_groups = gather_groups(groups, self._gather)
        return groups_to_rows(complete_groups) if dist.get_rank() == 0 else []

    def groups_from_rows(self, rows: Sequence[Mapping[str, object]]) -> list[SampleGroup]:
        groups = groups_from_rows(rows)
        return groups if dist.get_rank() == 0 else groups_of_index(index_of_groups(groups))

    def position_to_row(self, position: SamplingPosition) -> SamplingState:
        rank = dist.get_rank()
        holders: list[int] = []
        for group in position.waiting:
            holders += [holder_of(sample, rank) for sample in group.samples]
        waiting = gather_pending(position.waiting, self._gather)
        rows = waiting_to_rows(waiting, holders) if rank == 0 else []
        return {"data": position.data, "waiting_groups": rows}
