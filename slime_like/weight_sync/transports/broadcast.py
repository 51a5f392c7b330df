"""Broadcast transport: process groups of one sending trainer rank and all ranks of all servers."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from slime_like.servers.nodes import address_towards
from slime_like.servers.processes import LOOPBACK, EngineProcess
from slime_like.servers.server_pool import Worker
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.servers import Servers, UpdateIncomplete
from slime_like.weight_sync.transports.base import WeightTransport
from slime_like.weight_sync.transports.broadcast_ranks import BroadcastOrder, Turns
from slime_like.weight_sync.transports.overlap import Handover, send_while_made
from slime_like.weight_sync.transports.process_group import (
    BroadcastFailed,
    BroadcastGroup,
    GroupRendezvous,
    backend_of,
)
from slime_like.weights.buckets import Bucket, WeightBuckets
from slime_like.weights.export_plan import BucketPlan


class BroadcastTransport(WeightTransport):
    """Broadcasts weights. With `keep_copy` everything is sent from rank 0, which keeps a copy for
    servers that join late; otherwise every rank sends its own weights (broadcast_ranks.py)."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        self.restores = servers.settings.keep_copy
        self._groups: dict[int, BroadcastGroup] = {}  # sending rank -> group
        self._name = ""  # name of the groups
        self._rendezvous: GroupRendezvous | None = None
        # members of the groups; a restarted or evicted server counts as a new member
        self._members: list[tuple[Worker, EngineProcess | None, int]] = []
        self._sizes: list[int] = []  # their tensor-parallel sizes
        self._numbers = 0  # counter for unique names
        self._copy: tuple[int, list[Bucket]] | None = None  # version, weights

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """See `WeightTransport`. A server receives a bucket into the weights that it computes with,
        so only the first one is made before it pauses. If every rank sends, none is: the ranks get
        their order when it is known which servers take part."""
        if self._sends_from_rank_zero(ranks, self.servers.pool.alive()):
            ranks.gathered().make_first()

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """See `WeightTransport`."""
        if ranks.are_gathered or self._sends_from_rank_zero(ranks, workers):
            self.send(ranks.gathered(), version, workers)
        else:
            self.servers.in_session(
                workers, version, lambda ready: self._broadcast_from_all(ranks, version, ready)
            )

    def _sends_from_rank_zero(self, ranks: SendingRanks, workers: Sequence[Worker]) -> bool:
        return self.restores or not ranks.multiple_senders or self._is_unreachable(workers)

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        self._copy = None  # free the old copy first: never two in memory
        copy: list[Bucket] = []
        self.servers.in_session(
            workers,
            version,
            lambda ready: self._broadcast_from_rank_zero(weights, copy, version, ready),
        )
        self._copy = (version, copy) if self.restores else None

    def _is_unreachable(self, workers: Sequence[Worker]) -> bool:
        """Whether the servers listen only on rank 0's host, unreachable from other hosts."""
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        address = address_towards([worker.url for worker in workers])
        return local_world_size < dist.get_world_size() and address == LOOPBACK

    def _broadcast_from_rank_zero(
        self, weights: WeightBuckets, copy: list[Bucket], version: int, workers: Sequence[Worker]
    ) -> None:
        with self._abort_on_failure(workers):
            if rendezvous := self._new_rendezvous(workers, {0}):
                self._groups[0] = self._group(self._name, rendezvous, workers, self._sizes)

            def send(buckets: Handover) -> None:
                for bucket in buckets:
                    self._groups[0].send(
                        bucket.tensors, bucket.flat, version, is_last=bucket.is_last
                    )
                    if self.restores:
                        copy.append(dataclasses.replace(bucket, flat=bucket.flat.to("cpu")))
                    del bucket  # free it before the next one is taken

            send_while_made(weights.buckets(), send)

    def _broadcast_from_all(
        self, ranks: SendingRanks, version: int, workers: Sequence[Worker]
    ) -> None:
        senders = sorted({planned.sender for planned in ranks.plan})
        is_new = self._new_rendezvous(workers, senders) is not None
        assert self._rendezvous is not None
        order = BroadcastOrder(
            self._name,
            self._rendezvous.address,
            self._rendezvous.port,
            1 + sum(self._sizes),
            backend_of(self.servers.device),
            self._rendezvous.timeout_s,
            update=self._new_name(),
        )
        turns = Turns(self._rendezvous.store, order.update)
        weights = ranks.order(order)
        stream = weights.own().buckets()
        try:
            with self._abort_on_failure(workers):
                for sender in senders if is_new else ():
                    self._groups[sender] = self._group(
                        order.name_of(sender),
                        self._rendezvous,
                        workers,
                        self._sizes,
                        sends_here=sender == 0,
                        stopped=turns.raise_if_failed,
                    )
                send_while_made(
                    stream, lambda buckets: self._take_turns(weights.plan, buckets, version, turns)
                )
        except BaseException:
            turns.fail("a server, or another rank, failed")
            turns.end(range(len(weights.plan)))
            raise
        finally:
            for _ in stream:  # consume: it contains collectives
                pass

    def _take_turns(
        self, plan: Sequence[BucketPlan], own: Handover, version: int, turns: Turns
    ) -> None:
        def stopped() -> None:
            turns.raise_if_failed()
            own.raise_if_not_made()

        for number, planned in enumerate(plan):
            flat = next(own).flat if planned.sender == 0 else None
            turns.grant(number)
            self._groups[planned.sender].send(
                planned.tensors, flat, version, is_last=number == len(plan) - 1, stopped=stopped
            )
            del flat  # free it before the next one is taken

    @property
    def latest(self) -> int | None:
        return None if self._copy is None else self._copy[0]

    def restore(self, worker: Worker) -> None:
        """See `WeightTransport`. Uses a separate group, so that the other servers keep
        generating."""
        assert self._copy is not None, "asked where there is a latest version"
        version, weights = self._copy
        self.servers.begin(worker)
        try:
            rendezvous = self._rendezvous_for([worker])
            group = self._group(
                self._new_name(), rendezvous, [worker], self.servers.sizes([worker])
            )
            try:
                for bucket in weights:
                    group.send(bucket.tensors, bucket.flat, version, is_last=bucket.is_last)
            except BroadcastFailed:
                group.abandon()
                raise
        except BroadcastFailed as failure:
            raise UpdateIncomplete(str(failure)) from None
        group.close()
        self.servers.end(worker, version)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    @contextmanager
    def _abort_on_failure(self, workers: Sequence[Worker]) -> Iterator[None]:
        """A failure in this block ends all groups and the update."""
        try:
            yield
        except BroadcastFailed as failure:
            self._abandon()
            self.servers.abort_update(failure, [workers[i] for i in failure.servers], workers)

    def _abandon(self) -> None:
        for group in self._groups.values():
            group.abandon()
        self._groups = {}
        self._members = []

    def _new_rendezvous(
        self, workers: Sequence[Worker], senders: Collection[int]
    ) -> GroupRendezvous | None:
        """The rendezvous of new groups of these servers and senders; None if they exist already."""
        members = [(worker, worker.process, worker.evictions) for worker in workers]
        if self._groups.keys() == set(senders) and members == self._members:
            return None
        self._abandon()
        self._sizes = self.servers.sizes(workers)
        self._name = self._new_name()
        self._members = members
        self._rendezvous = self._rendezvous_for(workers)
        return self._rendezvous

    def _rendezvous_for(self, workers: Sequence[Worker]) -> GroupRendezvous:
        return GroupRendezvous([worker.url for worker in workers], self.servers.settings.timeout_s)

    def _new_name(self) -> str:
        self._numbers += 1
        return f"slime_like_weights_{time.time_ns():x}_{self._numbers}"

    def _group(
        self,
        name: str,
        rendezvous: GroupRendezvous,
        workers: Sequence[Worker],
        sizes: Sequence[int],
        *,
        sends_here: bool = True,
        stopped: Callable[[], None] = lambda: None,
    ) -> BroadcastGroup:
        calls = [partial(self.servers.call, worker) for worker in workers]
        device = self.servers.device
        return BroadcastGroup(
            name,
            rendezvous,
            self.servers.api,
            calls,
            sizes,
            device,
            sends_here=sends_here,
            stopped=stopped,
        )
