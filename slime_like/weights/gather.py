"""Gather sharded parameters into full tensors, in buckets of bounded size.

Every pipeline stage has one sender, its first tensor-parallel rank; in an MoE layer every group of
experts has one, its first expert-tensor-parallel rank. Senders are in the first data-parallel
replica; other replicas are not involved. A sender gathers the other shards of a bucket with one
collective. All ranks know the plan of all buckets in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.weights.buckets import Bucket, WeightBuckets, as_bytes, views
from slime_like.weights.export_plan import ALL_EXPERTS, BucketPlan, Parameter, Place, TensorPlan

if TYPE_CHECKING:
    from slime_like.megatron.parallel_layout import ParallelLayout


ALIGNMENT = 16  # alignment of a rank's part of a bucket, enough for any dtype


def find_senders(layout: ParallelLayout) -> dict[Place, int]:
    """The global rank of the sender of each place. Collective over all ranks."""
    own: list[Place] = []
    if layout.tp_rank == 0 and _is_first_copy(layout, None):
        own.append((layout.pp_rank, None))
    if layout.etp_rank == 0 and _is_first_copy(layout, layout.ep_rank):
        own.append((layout.pp_rank, layout.ep_rank))
        if layout.ep_rank == 0:
            own.append((layout.pp_rank, ALL_EXPERTS))
    senders: dict[Place, int] = {}
    for rank, places in enumerate(gather(own)):
        senders |= dict.fromkeys(places, rank)
    return senders


def _is_first_copy(layout: ParallelLayout, expert_rank: int | None) -> bool:
    """Whether this rank is in the first data-parallel replica of its parameters."""
    if expert_rank is None:
        return layout.dp_rank == 0 and layout.cp_rank == 0
    return layout.expert_dp_rank == 0


class WeightStream(WeightBuckets):
    """A single pass over all weights, in one of three ways: iterate for all weights on every rank,
    or use `own` or `to_ranks`. Collective: all ranks choose the same way and consume it completely.

    In addition to what the caller holds, a sender needs at most two buckets of memory: the shards
    of all ranks and the assembled tensors. Other ranks need their own shards or the received
    bucket.

    Args:
        plan: Equal on all ranks.
        device: Of the weights.
        shard: Returns this rank's shard of a parameter.
        assemble: Writes a parameter's outputs, given by name, from its shards.
    """

    def __init__(
        self,
        plan: Sequence[BucketPlan],
        layout: ParallelLayout,
        device: torch.device,
        shard: Callable[[Parameter], Tensor],
        assemble: Callable[[Parameter, Sequence[Tensor], Mapping[str, Tensor]], None],
    ) -> None:
        super().__init__(self._all_ranks())
        self.plan = tuple(plan)
        self._layout = layout
        self._device = device
        self._shard = shard
        self._assemble = assemble
        self._rank = dist.get_rank()

    def own(self) -> WeightBuckets:
        """On each sender the weights that it assembles, elsewhere nothing. Every weight is on one
        rank."""
        return WeightBuckets(self._on_senders())

    def to_rank_zero(self) -> WeightBuckets:
        """All weights on rank 0, nothing elsewhere."""
        return self.to_ranks([0])

    def to_ranks(self, receivers: Sequence[int]) -> WeightBuckets:
        """All weights on each of these ranks, such as the first of each node; nothing elsewhere."""
        return WeightBuckets(self._to_ranks(sorted(receivers)))

    def _all_ranks(self) -> Iterator[Bucket]:
        for number, planned in enumerate(self.plan):
            flat = self._collect(planned)
            if dist.get_world_size() > 1:
                flat = self._empty(planned) if flat is None else flat
                dist.broadcast(flat, src=planned.sender)
            assert flat is not None
            bucket = Bucket(planned.tensors, flat, number == len(self.plan) - 1)
            # A suspended generator keeps what its names refer to: without `del` the caller could
            # not free a bucket, and the next one would be collected beside it. The same below.
            del flat
            yield bucket
            del bucket

    def _on_senders(self) -> Iterator[Bucket]:
        remaining = sum(planned.sender == self._rank for planned in self.plan)
        for planned in self.plan:
            flat = self._collect(planned)
            if flat is not None:
                remaining -= 1
                bucket = Bucket(planned.tensors, flat, remaining == 0)
                del flat
                yield bucket
                del bucket

    def _to_ranks(self, receivers: Sequence[int]) -> Iterator[Bucket]:
        group = None
        if len(receivers) > 1:
            world = dist.group.WORLD
            assert world is not None, "more than one receiver"
            group = group_of(tuple(receivers), world)
        receives = self._rank in receivers
        for number, planned in enumerate(self.plan):
            flat = self._collect(planned)
            # The ranks of a node follow its first one, so a bucket crosses nodes in the broadcast
            # alone if the receivers are the first ranks of all nodes.
            first = max((r for r in receivers if r <= planned.sender), default=receivers[0])
            if planned.sender != first:
                if self._rank == planned.sender:
                    assert flat is not None
                    dist.send(flat, dst=first)
                    flat = None
                elif self._rank == first:
                    flat = self._empty(planned)
                    dist.recv(flat, src=planned.sender)
            if group is not None and receives:
                flat = self._empty(planned) if flat is None else flat
                dist.broadcast(flat, src=first, group=group)
            if receives:
                assert flat is not None
                bucket = Bucket(planned.tensors, flat, number == len(self.plan) - 1)
                del flat
                yield bucket
                del bucket

    def _empty(self, planned: BucketPlan) -> Tensor:
        return torch.empty(planned.nbytes, dtype=torch.uint8, device=self._device)

    def _collect(self, planned: BucketPlan) -> Tensor | None:
        """Assemble a bucket; returns its bytes on its sender, None on ranks that only contribute
        shards."""
        layout, (stage, expert_rank) = self._layout, planned.place
        if stage != layout.pp_rank or not _is_first_copy(layout, expert_rank):
            return None
        if expert_rank not in (None, ALL_EXPERTS, layout.ep_rank):
            return None
        if expert_rank == ALL_EXPERTS:
            size = layout.etp_size * layout.ep_size
            group = layout.etp_ep_group
        elif expert_rank is None:
            size = layout.tp_size
            group = layout.tp_group
        else:
            size = layout.etp_size
            group = layout.etp_group
        # widest dtypes first, so that each is aligned
        gathered = sorted(
            (p for p in planned.parameters if (p.sharded or p.stacked) and size > 1),
            key=lambda p: -p.dtype.itemsize,
        )
        rows = self._gather(gathered, planned.sender, size, group) if gathered else None
        if self._rank != planned.sender:
            return None
        shards = {} if rows is None else _split_shards(gathered, rows)
        flat = self._empty(planned)
        outputs = views(flat, planned.tensors)
        for parameter in planned.parameters:
            parts = shards.get(parameter.name) or [self._shard(parameter)]
            self._assemble(parameter, parts, {o.name: outputs[o.name] for o in parameter.outputs})
        return flat

    def _gather(
        self, parameters: Sequence[Parameter], sender: int, size: int, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Gather the shards of all ranks on the sender, [ranks, bytes] uint8; None elsewhere."""
        parts = [as_bytes(self._shard(parameter)) for parameter in parameters]
        size_here = sum(part.numel() for part in parts)
        local = torch.cat([*parts, parts[0].new_zeros(-size_here % ALIGNMENT)])
        del parts  # the copies in `local` are sent
        if self._rank != sender:
            dist.gather(local, None, dst=sender, group=group)
            return None
        rows = local.new_empty(size, local.numel())
        dist.gather(local, list(rows.unbind()), dst=sender, group=group)
        return rows


@cache
def group_of(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group of these ranks, created once per `world`. Collective over all ranks."""
    return dist.new_group(list(ranks))


def _split_shards(parameters: Sequence[Parameter], rows: Tensor) -> dict[str, list[Tensor]]:
    shards: dict[str, list[Tensor]] = {}
    start = 0
    for parameter in parameters:
        plan = TensorPlan(parameter.name, parameter.shape, parameter.dtype)
        end = start + plan.nbytes
        shards[parameter.name] = [
            row[start:end].view(plan.dtype).view(plan.shape) for row in rows.unbind()
        ]
        start = end
    return shards
