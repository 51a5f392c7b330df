"""Weights over a process group of rank 0 and every rank of every server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime_like.rollout.engines.sglang.processes import ServerProcess
from slime_like.rollout.engines.sglang.server_pool import Worker
from slime_like.rollout.engines.sglang.weight_transfer.base import WeightTransport
from slime_like.rollout.engines.sglang.weight_transfer.process_group import (
    BroadcastFailed,
    BroadcastGroup,
)
from slime_like.rollout.engines.sglang.weight_transfer.servers import Servers, UpdateIncomplete
from slime_like.weights.buckets import Bucket, WeightBuckets


class BroadcastTransport(WeightTransport):
    """Keeps a copy of the weights in this process's memory, unless the settings say otherwise, for
    a server that comes late."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        self.restores = servers.settings.keep_copy
        self._group: BroadcastGroup | None = None
        # of the group; a server that was started again, or was out, is another one
        self._members: list[tuple[Worker, ServerProcess | None, int]] = []
        self._groups_made = 0
        self._copy: tuple[int, list[Bucket]] | None = None  # version, weights

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        self._copy = None  # never two in memory
        copy: list[Bucket] = []
        self.servers.in_session(workers, lambda ready: self._move(weights, copy, version, ready))
        self._copy = (version, copy) if self.restores else None

    def _move(
        self, weights: WeightBuckets, copy: list[Bucket], version: int, workers: Sequence[Worker]
    ) -> None:
        group = self._group_of(workers)
        for bucket in weights.buckets():
            try:
                group.send(bucket, version)
            except BroadcastFailed as failure:
                self._group = None
                group.abandon()
                self.servers.give_up(failure, [workers[i] for i in failure.servers], workers)
            if self.restores:
                copy.append(dataclasses.replace(bucket, flat=bucket.flat.to("cpu")))
            del bucket  # before the next one is made

    @property
    def latest(self) -> int | None:
        return None if self._copy is None else self._copy[0]

    def restore(self, worker: Worker) -> None:
        """Over a group of its own: the others go on generating."""
        assert self._copy is not None, "asked where there is a latest version"
        version, weights = self._copy
        self.servers.begin(worker)
        try:
            group = self._new_group([worker])
            try:
                for bucket in weights:
                    group.send(bucket, version)
            except BroadcastFailed:
                group.abandon()
                raise
        except BroadcastFailed as failure:
            raise UpdateIncomplete(str(failure)) from None
        group.close()
        self.servers.end(worker)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _group_of(self, workers: Sequence[Worker]) -> BroadcastGroup:
        """The group with just these servers: the one that is there, or a new one."""
        members = [(worker, worker.process, worker.evictions) for worker in workers]
        if self._group is not None and members == self._members:
            return self._group
        if self._group is not None:
            self._group.abandon()
            self._group = None
        try:
            self._group = self._new_group(workers)
        except BroadcastFailed as failure:
            self.servers.give_up(failure, [workers[i] for i in failure.servers], workers)
        self._members = members
        assert self._group is not None
        return self._group

    def _new_group(self, workers: Sequence[Worker]) -> BroadcastGroup:
        self._groups_made += 1
        backend = "nccl" if self.servers.device.type == "cuda" else "gloo"

        def call_of(worker: Worker) -> Callable[[str, dict[str, Any]], Any]:
            return lambda path, body: self.servers.call(worker, path, body)

        return BroadcastGroup(
            f"slime_like_weights_{time.time_ns():x}_{self._groups_made}", [w.url for w in workers], [call_of(w) for w in workers],
            self.servers.sizes(workers), backend, self.servers.device, self.servers.settings.timeout_s,
        )  # fmt: skip
