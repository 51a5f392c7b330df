"""Which ranks send in a weight update: rank 0 alone, or every rank that has weights.

Rank 0 talks to the servers and decides. The other ranks wait for its order: gather their weights to
rank 0, or send them themselves.
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
    """Tells a rank what to do with its weights; broadcast from rank 0."""

    def assist(self, weights: WeightStream) -> None:
        """Called on every rank except 0. Consumes the stream to its end even after an error, which
        rank 0 learns of by other means."""
        ...


class SendingRanks:
    """One weight update over all ranks. Rank 0 calls either `whole` or `order` once, then `finish`;
    the other ranks call `assist`."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> None:
        """weights: a `WeightStream`, or any other iterator, of which only rank 0's is used.
        max_bytes: bucket size for the latter."""
        self._weights = weights
        self._max_bytes = max_bytes
        self._told = False
        self._whole: WeightBuckets | None = None

    @property
    def several(self) -> bool:
        """Whether ranks other than 0 can send."""
        return isinstance(self._weights, WeightStream) and dist.get_world_size() > 1

    @property
    def plan(self) -> tuple[BucketPlan, ...]:
        """Which rank sends which bucket, if several ranks send."""
        assert isinstance(self._weights, WeightStream), "asked where there are several"
        return self._weights.plan

    def whole(self) -> WeightBuckets:
        """All weights, gathered on rank 0."""
        self._tell(None)
        self._whole = self._handed_over()
        return self._whole

    def order(self, order: Order) -> WeightStream:
        """Broadcast `order` to the other ranks. Rank 0 has to consume the returned stream in the
        same way."""
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
        """End the update, also after an error, so that no rank keeps waiting."""
        if not self._told:
            self.whole()
        for _ in self._whole or ():
            pass

    def report(self) -> tuple[dict[str, tuple[int, ...]], int]:
        """Shape of every sent weight by name, and the total bytes."""
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
