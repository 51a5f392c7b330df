"""Who sends in a weight update: rank 0 alone, or every rank that has weights to send.

Rank 0 talks to the servers and decides. The others wait for one word of it, which tells them to
hand their weights over, or what to do with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import share
from slime_like.errors import RunError
from slime_like.weights.gather import BucketPlan, WeightBuckets, WeightStream, as_buckets


class Order(Protocol):
    """What a rank does with the weights that it sends; it travels from rank 0."""

    def assist(self, weights: WeightStream) -> None:
        """On every rank but 0. Takes the stream to its end, whatever happens; rank 0 hears of
        errors in its own way."""
        ...


class SendingRanks:
    """One update, on all ranks. On rank 0 one of `whole` and `order` is called, once, and `finish`
    in the end; on the others `assist`."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> None:
        """weights: a `WeightStream`, or what rank 0 has of another stream. max_bytes: of a bucket of
        such a one."""
        self._weights = weights
        self._max_bytes = max_bytes
        self._told = False
        self._whole: WeightBuckets | None = None

    @property
    def several(self) -> bool:
        """Whether there may be others than rank 0."""
        return isinstance(self._weights, WeightStream) and dist.get_world_size() > 1

    @property
    def plan(self) -> tuple[BucketPlan, ...]:
        """Who sends what, where there are several."""
        assert isinstance(self._weights, WeightStream), "asked where there are several"
        return self._weights.plan

    def whole(self) -> WeightBuckets:
        """All weights, on rank 0."""
        self._tell(None)
        self._whole = self._handed_over()
        return self._whole

    def order(self, order: Order) -> WeightStream:
        """The others do it; rank 0 is to take its part of the stream in the same way."""
        assert isinstance(self._weights, WeightStream), "asked where there are several"
        self._tell(order)
        return self._weights

    def assist(self) -> None:
        order: Order | None = share(None)
        if order is None:
            for _ in self._handed_over():
                pass
        else:
            assert isinstance(self._weights, WeightStream)
            with contextlib.suppress(RunError, ValueError, OSError):  # rank 0 raises it
                order.assist(self._weights)

    def finish(self) -> None:
        """After an error too: nobody waits any more."""
        if not self._told:
            self.whole()
        for _ in self._whole or ():
            pass

    def report(self) -> tuple[dict[str, tuple[int, ...]], int]:
        """Shapes by name, and bytes, of what was sent."""
        if isinstance(self._weights, WeightStream):
            tensors = [tensor for planned in self._weights.plan for tensor in planned.tensors]
            return {t.name: t.shape for t in tensors}, sum(t.nbytes for t in tensors)
        assert self._whole is not None
        return self._whole.shapes, self._whole.nbytes

    def _tell(self, order: Order | None) -> None:
        assert not self._told
        self._told = True
        share(order)

    def _handed_over(self) -> WeightBuckets:
        if isinstance(self._weights, WeightStream):
            return self._weights.to_rank_zero()
        return as_buckets(self._weights, self._max_bytes)
