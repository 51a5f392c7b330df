"""Gather sharded parameters into full tensors, in buckets of bounded size.

Every pipeline stage has one sender, its first tensor-parallel rank; in an MoE layer every group of
experts has one, its first expert-tensor-parallel rank. Senders are in the first data-parallel
replica; other replicas are not involved. A sender gathers the other shards of a bucket with one
collective. All ranks know the plan of all buckets in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.megatron.parallel_layout import ParallelLayout

DEFAULT_BUCKET_BYTES = 512 * 2**20  # of --update-weight-buffer-size


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What a weight will be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorPlan:
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def fits(size: int, tensors: Sequence[TensorPlan], max_bytes: int) -> bool:
    """Whether `tensors` may follow in a bucket that has `size` bytes: within the limit, and each
    where its dtype may begin. An empty bucket takes whatever comes."""
    start = size
    for tensor in tensors:
        if start % tensor.dtype.itemsize:
            return False
        start += tensor.nbytes
    return not size or start <= max_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights that travel together. flat: [bytes] uint8, the weights one after another without
    gaps, which is what SGLang's load format "flattened_bucket" expects. is_last: nothing comes
    after it."""

    tensors: tuple[TensorPlan, ...]
    flat: Tensor
    is_last: bool = False

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @property
    def dtypes(self) -> list[str]:
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]

    @property
    def weights(self) -> list[tuple[str, Tensor]]:
        """Views of `flat`."""
        return list(views(self.flat, self.tensors).items())


def views(flat: Tensor, tensors: Sequence[TensorPlan]) -> dict[str, Tensor]:
    """The weights of a bucket's bytes, by name."""
    found, start = {}, 0
    for tensor in tensors:
        end = start + tensor.nbytes
        found[tensor.name] = flat[start:end].view(tensor.dtype).view(tensor.shape)
        start = end
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8; a view where that is possible."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def in_buckets(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """At most `max_bytes` each, or one weight. At any time one bucket, the weights that it is made
    of, and the weight behind them are held."""
    pending: list[tuple[TensorPlan, Tensor]] = []
    size = 0

    def bucket(*, is_last: bool) -> Bucket:
        flat = torch.cat([as_bytes(tensor) for _, tensor in pending])
        return Bucket(tuple(plan for plan, _ in pending), flat, is_last)

    for name, tensor in weights:
        plan = TensorPlan.of(name, tensor)
        if pending and not fits(size, [plan], max_bytes):
            yield bucket(is_last=False)
            pending, size = [], 0
        pending.append((plan, tensor))
        size += plan.nbytes
    if pending:
        yield bucket(is_last=True)


class WeightBuckets(Iterator[tuple[str, Tensor]]):
    """A stream of (Hugging Face name, tensor) pairs that comes in buckets: take the pairs, or
    `buckets`, and all of them. Neither holds what was taken when it makes the next. shapes, nbytes:
    of what has been taken."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.nbytes = 0
        self._buckets = buckets
        self._pairs = self._in_pairs()

    def buckets(self) -> Iterator[Bucket]:
        while (bucket := next(self._buckets, None)) is not None:
            self.shapes |= {tensor.name: tensor.shape for tensor in bucket.tensors}
            self.nbytes += bucket.flat.nbytes
            yield bucket
            del bucket

    def _in_pairs(self) -> Iterator[tuple[str, Tensor]]:
        taken = self.buckets()
        while (bucket := next(taken, None)) is not None:
            yield from bucket.weights
            del bucket

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)


def as_buckets(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> WeightBuckets:
    """The stream itself where it comes in buckets, else in those of `in_buckets`."""
    if isinstance(weights, WeightBuckets):
        return weights
    return WeightBuckets(in_buckets(weights, max_bytes))


ALIGNMENT = 16  # of a rank's part of a bucket, for any dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that some ranks hold, or hold shards of. stage: the pipeline stage that has it. expert:
    its number; None: not an expert's. shape: of a shard. sharded: over the tensor-parallel ranks
    (an expert's: the expert-tensor-parallel ones), else each has the whole. dtype: of the shards.
    outputs: the tensors that are made of it. stacked: it is that parameter of all experts of its
    layer, one above the other, and a rank has those of the experts it holds."""

    name: str
    stage: int
    expert: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool
    outputs: tuple[TensorPlan, ...]
    stacked: bool = False


EVERY_EXPERT = -1
# pipeline stage, and expert-parallel rank of experts; `EVERY_EXPERT` where they are stacked
Place = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """sender: the global rank that puts it together."""

    place: Place
    sender: int
    parameters: tuple[Parameter, ...]

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(tensor for parameter in self.parameters for tensor in parameter.outputs)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_buckets(
    parameters: Sequence[Parameter],
    senders: Mapping[Place, int],
    experts_per_rank: int,
    max_bytes: int,
) -> list[BucketPlan]:
    """Of at most `max_bytes` each, or one parameter, every one of a single sender's; parameters of
    a sender are in their order. The same on every rank."""
    open_buckets: dict[Place, list[Parameter]] = {}
    sizes: dict[Place, int] = {}
    plan: list[BucketPlan] = []

    def close(place: Place) -> None:
        plan.append(BucketPlan(place, senders[place], tuple(open_buckets.pop(place))))

    for parameter in parameters:
        expert = parameter.expert
        group = EVERY_EXPERT if parameter.stacked else expert and expert // experts_per_rank
        place = (parameter.stage, group)
        if place in open_buckets and not fits(sizes[place], parameter.outputs, max_bytes):
            close(place)
        if place not in open_buckets:
            open_buckets[place], sizes[place] = [], 0
        open_buckets[place].append(parameter)
        sizes[place] += sum(tensor.nbytes for tensor in parameter.outputs)
    for place in list(open_buckets):
        close(place)
    return plan


def find_senders(layout: ParallelLayout) -> dict[Place, int]:
    """The global rank that sends for each place. Collective over all ranks."""
    mine: list[Place] = []
    if layout.tp_rank == 0 and _is_first_copy(layout, None):
        mine.append((layout.pp_rank, None))
    if layout.etp_rank == 0 and _is_first_copy(layout, layout.ep_rank):
        mine.append((layout.pp_rank, layout.ep_rank))
        mine += [(layout.pp_rank, EVERY_EXPERT)] * (layout.ep_rank == 0)
    return {place: rank for rank, places in enumerate(gather(mine)) for place in places}


def _is_first_copy(layout: ParallelLayout, expert_rank: int | None) -> bool:
    """Whether this rank is of the first data-parallel copy of what it holds."""
    if expert_rank is None:
        return layout.dp_rank == 0 and layout.cp_rank == 0
    return layout.expert_dp_rank == 0


class WeightStream(WeightBuckets):
    """All weights, once, in one of three ways; a collective over all ranks, which take the same way
    to its end. As an iterator it is `everywhere`.

    plan: the same on all ranks. shard: of this rank, of a parameter that it has. assemble: writes
    the outputs of a parameter, given with their names, from its shards. device: of all of it.

    Next to what the caller still holds, a sender has at most two buckets at a time: the shards of
    all ranks, and what is made of them; other ranks have their own part, or the bucket that they
    receive.
    """

    def __init__(
        self,
        plan: Sequence[BucketPlan],
        layout: ParallelLayout,
        device: torch.device,
        shard: Callable[[Parameter], Tensor],
        assemble: Callable[[Parameter, Sequence[Tensor], Mapping[str, Tensor]], None],
    ) -> None:
        super().__init__(self._everywhere())
        self.plan = tuple(plan)
        self._layout = layout
        self._device = device
        self._shard = shard
        self._assemble = assemble
        self._rank = dist.get_rank()

    def own(self) -> WeightBuckets:
        """On each sender what it sends; on the other ranks nothing. Every weight is on one rank."""
        return WeightBuckets(self._own())

    def to_rank_zero(self) -> WeightBuckets:
        """All on rank 0, nothing on the other ranks."""
        return WeightBuckets(self._to_rank_zero())

    def _everywhere(self) -> Iterator[Bucket]:
        for number, planned in enumerate(self.plan):
            flat = self._collect(planned)
            if dist.get_world_size() > 1:
                flat = self._empty(planned) if flat is None else flat
                dist.broadcast(flat, src=planned.sender)
            assert flat is not None
            bucket = Bucket(planned.tensors, flat, number == len(self.plan) - 1)
            del flat
            yield bucket
            del bucket

    def _own(self) -> Iterator[Bucket]:
        left = sum(planned.sender == self._rank for planned in self.plan)
        for planned in self.plan:
            flat = self._collect(planned)
            if flat is not None:
                left -= 1
                bucket = Bucket(planned.tensors, flat, left == 0)
                del flat
                yield bucket
                del bucket

    def _to_rank_zero(self) -> Iterator[Bucket]:
        for number, planned in enumerate(self.plan):
            flat = self._collect(planned)
            if planned.sender != 0 and self._rank == 0:
                flat = self._empty(planned)
                dist.recv(flat, src=planned.sender)
            elif flat is not None and self._rank != 0:
                dist.send(flat, dst=0)
                flat = None
            if flat is not None:
                bucket = Bucket(planned.tensors, flat, number == len(self.plan) - 1)
                del flat
                yield bucket
                del bucket

    def _empty(self, planned: BucketPlan) -> Tensor:
        return torch.empty(planned.nbytes, dtype=torch.uint8, device=self._device)

    def _collect(self, planned: BucketPlan) -> Tensor | None:
        """The bucket's bytes, on its sender; None elsewhere, where this rank's part was given."""
        layout, (stage, expert_rank) = self._layout, planned.place
        if stage != layout.pp_rank or not _is_first_copy(layout, expert_rank):
            return None
        if expert_rank not in (None, EVERY_EXPERT, layout.ep_rank):
            return None
        if expert_rank == EVERY_EXPERT:  # there are no expert-tensor-parallel ranks
            size, group = layout.ep_size, layout.ep_group
        elif expert_rank is None:
            size, group = layout.tp_size, layout.tp_group
        else:
            size, group = layout.etp_size, layout.etp_group
        # the widest dtypes first: each begins where it may
        cut = sorted(
            (p for p in planned.parameters if (p.sharded or p.stacked) and size > 1),
            key=lambda p: -p.dtype.itemsize,
        )
        rows = self._gather(cut, planned.sender, size, group) if cut else None
        if self._rank != planned.sender:
            return None
        shards = {} if rows is None else _shards(cut, rows)
        flat = self._empty(planned)
        outputs = views(flat, planned.tensors)
        for parameter in planned.parameters:
            found = shards.get(parameter.name) or [self._shard(parameter)]
            self._assemble(parameter, found, {o.name: outputs[o.name] for o in parameter.outputs})
        return flat

    def _gather(
        self, cut: Sequence[Parameter], sender: int, size: int, group: dist.ProcessGroup
    ) -> Tensor | None:
        """[ranks, bytes] uint8 on the sender: each rank's shards, one after another."""
        parts = [as_bytes(self._shard(parameter)) for parameter in cut]
        size_here = sum(part.numel() for part in parts)
        mine = torch.cat([*parts, parts[0].new_zeros(-size_here % ALIGNMENT)])
        del parts
        if self._rank != sender:
            dist.gather(mine, None, dst=sender, group=group)
            return None
        rows = mine.new_empty(size, mine.numel())
        dist.gather(mine, list(rows.unbind()), dst=sender, group=group)
        return rows


def _shards(cut: Sequence[Parameter], rows: Tensor) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    start = 0
    for parameter in cut:
        plan = TensorPlan(parameter.name, parameter.shape, parameter.dtype)
        end = start + plan.nbytes
        found[parameter.name] = [
            row[start:end].view(plan.dtype).view(plan.shape) for row in rows.unbind()
        ]
        start = end
    return found
