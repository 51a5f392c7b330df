"""Plan of an export, equal on all ranks: which tensors go into which bucket, and which rank
assembles it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

DEFAULT_BUCKET_BYTES = 512 * 2**20  # default of --update-weight-buffer-size


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Name, shape and dtype of a weight to come."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorPlan:
        return cls(name, tuple(tensor.shape), tensor.dtype)


def fits(size: int, tensors: Sequence[TensorPlan], max_bytes: int) -> bool:
    """Whether `tensors` fit into a bucket that already has `size` bytes: within the limit, and each
    aligned to its dtype. An empty bucket accepts anything."""
    start = size
    for tensor in tensors:
        if start % tensor.dtype.itemsize:
            return False
        start += tensor.nbytes
    return not size or start <= max_bytes


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that some ranks hold, fully or as shards."""

    name: str
    stage: int  # its pipeline stage
    expert: int | None  # the expert's number; None for other parameters
    shape: tuple[int, ...]  # of a shard
    dtype: torch.dtype  # of a shard
    # over tensor-parallel ranks (expert-tensor-parallel for experts); otherwise each rank has the
    # full parameter
    sharded: bool
    outputs: tuple[TensorPlan, ...]  # tensors assembled from it
    # the parameter of all experts of a layer; a rank holds the rows of its experts
    stacked: bool = False


ALL_EXPERTS = -1
# pipeline stage and the experts' expert-parallel rank; `ALL_EXPERTS` for stacked parameters
Place = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Parameters of one bucket."""

    place: Place
    sender: int  # global rank that assembles it
    parameters: tuple[Parameter, ...]

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        return tuple(chain.from_iterable(parameter.outputs for parameter in self.parameters))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_buckets(
    parameters: Sequence[Parameter],
    senders: Mapping[Place, int],
    experts_per_rank: int,
    max_bytes: int,
) -> list[BucketPlan]:
    """Assign parameters to buckets of at most `max_bytes`, or of one larger parameter. Each bucket
    has one sender and keeps the order of its parameters. Equal on every rank."""
    pending: dict[Place, list[Parameter]] = {}
    sizes: dict[Place, int] = {}
    plan: list[BucketPlan] = []

    def close(place: Place) -> None:
        plan.append(BucketPlan(place, senders[place], tuple(pending.pop(place))))

    for parameter in parameters:
        expert = parameter.expert
        group = ALL_EXPERTS if parameter.stacked else expert and expert // experts_per_rank
        place = (parameter.stage, group)
        if place in pending and not fits(sizes[place], parameter.outputs, max_bytes):
            close(place)
        if place not in pending:
            pending[place], sizes[place] = [], 0
        pending[place].append(parameter)
        sizes[place] += sum(tensor.nbytes for tensor in parameter.outputs)
    for place in list(pending):
        close(place)
    return plan
