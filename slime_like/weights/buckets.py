"""Buckets of weights: several tensors in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.weights.export_plan import TensorPlan, fits


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights that are transferred together."""

    tensors: tuple[TensorPlan, ...]
    # [bytes] uint8, the weights concatenated without padding, as SGLang's load format
    # "flattened_bucket" expects
    flat: Tensor
    is_last: bool = False  # whether this is the last bucket

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
        """(name, view of `flat`) of every weight."""
        return list(views(self.flat, self.tensors).items())


def views(flat: Tensor, tensors: Sequence[TensorPlan]) -> dict[str, Tensor]:
    """Split a bucket's bytes into weights by name, as views."""
    weights = {}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        weights[tensor.name] = flat[start:end].view(tensor.dtype).view(tensor.shape)
        start = end
    return weights


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8; a view where that is possible."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def in_buckets(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Pack weights into buckets of at most `max_bytes`, or of one larger weight. Holds one bucket,
    its source weights and the next weight at a time."""
    pending: list[tuple[TensorPlan, Tensor]] = []
    size = 0

    def bucket(*, is_last: bool) -> Bucket:
        flat = torch.cat([as_bytes(tensor) for _, tensor in pending])
        return Bucket(tuple(plan for plan, _ in pending), flat, is_last)

    for name, tensor in weights:
        plan = TensorPlan.of(name, tensor)
        if pending and not fits(size, [plan], max_bytes):
            yield bucket(is_last=False)
            pending = []
            size = 0
        pending.append((plan, tensor))
        size += plan.nbytes
    if pending:
        yield bucket(is_last=True)


class WeightBuckets(Iterator[tuple[str, Tensor]]):
    """A stream of (Hugging Face name, tensor) pairs that is produced in buckets. Consume either the
    pairs or `buckets`, completely. What was consumed is released before the next is produced."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}  # of what has been consumed, as are the bytes
        self.nbytes = 0
        self._buckets = buckets
        self._first: Bucket | None = None  # made in advance
        self._pairs = self._in_pairs()

    def make_first(self) -> None:
        """Make the first bucket in advance."""
        assert self._first is None, "once, before the others"
        self._first = next(self._buckets, None)

    def buckets(self) -> Iterator[Bucket]:
        while (bucket := self._made()) is not None:
            self.shapes |= {tensor.name: tensor.shape for tensor in bucket.tensors}
            self.nbytes += bucket.flat.nbytes
            yield bucket
            del bucket  # a suspended generator would keep it while the next one is made

    def _made(self) -> Bucket | None:
        first = self._first
        self._first = None
        return next(self._buckets, None) if first is None else first

    def _in_pairs(self) -> Iterator[tuple[str, Tensor]]:
        buckets = self.buckets()
        while (bucket := next(buckets, None)) is not None:
            yield from bucket.weights
            del bucket  # as above

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)


def as_buckets(weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> WeightBuckets:
    """The stream itself if it is already bucketed, otherwise packed by `in_buckets`."""
    if isinstance(weights, WeightBuckets):
        return weights
    return WeightBuckets(in_buckets(weights, max_bytes))
