"""Weights on their way, in messages of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
