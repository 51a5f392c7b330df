"""Push a weight version to all servers over one of the transports, one update at a time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from slime_like.errors import RunError
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.text import shown
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.servers import Servers, UpdateIncomplete
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.transports.base import WeightTransport, weight_transports


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Result of an update."""

    workers: list[Worker]  # servers that have it
    shapes: dict[str, tuple[int, ...]]  # of every weight, by name
    nbytes: int
    seconds: float  # transfer time, with what was staged


class WeightUpdater:
    """Updates servers; on rank 0 only.

    transport: overrides the one in the settings.
    """

    def __init__(
        self,
        pool: ServerPool,
        settings: UpdateSettings,
        hf_checkpoint: str,
        device: torch.device,
        transport: type[WeightTransport] | None = None,
    ) -> None:
        self.servers = Servers(pool, settings, hf_checkpoint, device)
        self.transport = (transport or transport_of(settings))(self.servers)
        # servers with the latest weights, with their eviction counts at that time
        self._holders: list[tuple[Worker, int]] = []
        self._staging_s = 0.0  # of the next update
        # held by an update (training thread) or a restore (health-check thread)
        self._one_at_a_time = threading.Lock()
        if self.transport.restores:
            pool.restore = self.restore

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """Do in advance what needs no pause of the servers; `update` follows. Meanwhile the
        health-check thread goes on: it may be minutes."""
        start = time.monotonic()
        with self._one_at_a_time:
            self.transport.before_stage(version)
        self.transport.stage(ranks, version)
        self._staging_s = time.monotonic() - start

    def update(self, ranks: SendingRanks, version: int) -> TransferReport:
        """Update all servers; returns when every remaining server has the weights. Servers that
        fail are evicted. Raises UpdateIncomplete if the update has to be repeated, RunError if no
        server is left."""
        with self._one_at_a_time:
            start = time.monotonic()
            workers = [(worker, worker.evictions) for worker in self.servers.pool.alive()]
            self._holders = []
            self.transport.update(ranks, version, [worker for worker, _ in workers])
            # a server evicted and returned since then has old weights or none
            self._holders = [(w, n) for w, n in workers if w.alive and w.evictions == n]
            seconds = self._staging_s + time.monotonic() - start
            holders = [worker for worker, _ in self._holders]
        shapes, nbytes = ranks.report()
        if self.transport.moved_bytes is not None:
            nbytes = self.transport.moved_bytes
        return TransferReport(holders, shapes, nbytes, seconds)

    def restore(self, worker: Worker) -> int | None:
        """Send the latest weights to a server that returned; called in the health-check thread.
        Returns their version, or None if only the next update can. Raises RunError if that
        fails."""
        with self._one_at_a_time:
            version = self.transport.latest
            evictions = worker.evictions
            if version is None:
                return None
            if (worker, evictions) in self._holders:  # an update has reached it already
                return version
            pool = self.servers.pool
            try:
                self.transport.restore(worker)
                reported = pool.weight_version(worker)
                # it may have been evicted while paused
                pool.post(worker, pool.api.resume, timeout_s=CONTROL_S)
            except (RequestFailed, UpdateIncomplete, RunError) as failure:
                raise RunError(
                    f"the engine {worker.url} did not get the weights: {failure}"
                ) from None
            if reported != str(version):
                raise RunError(
                    f"the engine {worker.url} reports weight version {shown(reported)} "
                    f"after an update to {version}"
                )
            self._holders.append((worker, evictions))
            return version

    def close(self) -> None:
        self.transport.close()


def transport_of(settings: UpdateSettings) -> type[WeightTransport]:
    if settings.adapter is not None:
        from slime_like.weight_sync.transports.adapter import AdapterTransport

        return AdapterTransport
    if settings.delta:
        from slime_like.weight_sync.transports.delta import DeltaTransport

        return DeltaTransport
    return weight_transports.get(settings.transport)
