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
from slime_like.weights.buckets import WeightBuckets, as_buckets
from slime_like.weights.export_plan import BucketPlan
from slime_like.weights.gather import WeightStream


class Order(Protocol):
    """Tells a rank what to do with its weights; broadcast from rank 0."""

    def assist(self, weights: WeightStream) -> None:
        """Called on every rank except 0. Consumes the stream to its end even after an error, which
        rank 0 learns of by other means."""
        ...


class SendingRanks:
    """One weight update over all ranks. Rank 0 calls either `gathered` or, once, `order`, then
    `finish`; the other ranks call `assist`."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]], max_bytes: int) -> None:
        """
        Args:
            weights: A `WeightStream`, or any other iterator, of which only rank 0's is used.
            max_bytes: Bucket size for the latter.
        """
        self._weights = weights
        self._max_bytes = max_bytes
        self._order_sent = False
        self._gathered: WeightBuckets | None = None

    @property
    def multiple_senders(self) -> bool:
        """Whether ranks other than 0 can send."""
        return isinstance(self._weights, WeightStream) and dist.get_world_size() > 1

    @property
    def are_gathered(self) -> bool:
        """Whether `gathered` was called."""
        return self._gathered is not None

    @property
    def plan(self) -> tuple[BucketPlan, ...]:
        """Which rank sends which bucket, if several ranks send."""
        assert isinstance(self._weights, WeightStream), "asked where there are several"
        return self._weights.plan

    def gathered(self) -> WeightBuckets:
        """All weights, gathered on rank 0; the same stream each time."""
        if self._gathered is None:
            self._send_order(None)
            self._gathered = self._gather()
        return self._gathered

    def order(self, order: Order) -> WeightStream:
        """Broadcast `order` to the other ranks. Rank 0 has to consume the returned stream in the
        same way."""
        assert isinstance(self._weights, WeightStream), "asked where there are several"
        self._send_order(order)
        return self._weights

    def assist(self) -> None:
        order: Order | None = share(None)
        if order is None:
            for _ in self._gather():
                pass
        else:
            assert isinstance(self._weights, WeightStream)
            with contextlib.suppress(RunError, ValueError, OSError):  # rank 0 raises it
                order.assist(self._weights)

    def finish(self) -> None:
        """End the update, also after an error, so that no rank keeps waiting."""
        if not self._order_sent:
            self.gathered()
        for _ in self._gathered or ():
            pass

    def report(self) -> tuple[dict[str, tuple[int, ...]], int]:
        """Shape of every sent weight by name, and the total bytes."""
        if isinstance(self._weights, WeightStream):
            tensors = [tensor for planned in self._weights.plan for tensor in planned.tensors]
            return {t.name: t.shape for t in tensors}, sum(t.nbytes for t in tensors)
        assert self._gathered is not None
        return self._gathered.shapes, self._gathered.nbytes

    def _send_order(self, order: Order | None) -> None:
        assert not self._order_sent
        self._order_sent = True
        share(order)

    def _gather(self) -> WeightBuckets:
        if isinstance(self._weights, WeightStream):
            return self._weights.to_rank_zero()
        return as_buckets(self._weights, self._max_bytes)
