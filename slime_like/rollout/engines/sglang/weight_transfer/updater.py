"""New weights for all servers: one update at a time, versioned, over one of the transports."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from slime_like.errors import RunError
from slime_like.rollout.engines.checked_json import shown
from slime_like.rollout.engines.sglang.control_answers import weight_version
from slime_like.rollout.engines.sglang.http import RequestFailed
from slime_like.rollout.engines.sglang.server_pool import Fleet, Worker
from slime_like.rollout.engines.sglang.weight_transfer.base import (
    UpdateSettings,
    WeightTransport,
    weight_transports,
)
from slime_like.rollout.engines.sglang.weight_transfer.sending_ranks import SendingRanks
from slime_like.rollout.engines.sglang.weight_transfer.servers import (
    CONTROL_S,
    Servers,
    UpdateIncomplete,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What an update moved. workers: that have it. shapes: of every weight, by name. seconds: of
    the moving alone."""

    workers: list[Worker]
    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    seconds: float


class WeightUpdater:
    """On rank 0, which talks to the servers.

    transport: in place of the one that the settings name.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: UpdateSettings,
        hf_checkpoint: str,
        device: torch.device,
        transport: type[WeightTransport] | None = None,
    ) -> None:
        self.servers = Servers(fleet, settings, hf_checkpoint, device)
        self.transport = (transport or transport_of(settings))(self.servers)
        # servers with the weights of the latest update, and how often each had been out
        self._holders: list[tuple[Worker, int]] = []
        # an update by the training thread, or a server that gets weights by the one that watches
        self._one_at_a_time = threading.Lock()
        if self.transport.restores:
            fleet.restore = self.restore

    def update(self, ranks: SendingRanks, version: int) -> TransferReport:
        """Returns when every server that is still in the fleet has the weights; one that fails is
        evicted. Raises UpdateIncomplete when the update is to be made again, RunError when none is
        left."""
        with self._one_at_a_time:
            return self._update(ranks, version)

    def _update(self, ranks: SendingRanks, version: int) -> TransferReport:
        workers = self.servers.fleet.alive()
        evictions = [worker.evictions for worker in workers]
        self._holders = []
        start = time.monotonic()
        self.transport.update(ranks, version, workers)
        # One that was out meanwhile, and is back, has old weights or none.
        self._holders = [
            (w, before)
            for w, before in zip(workers, evictions, strict=True)
            if w.alive and w.evictions == before
        ]
        shapes, nbytes = ranks.report()
        if self.transport.moved_bytes is not None:
            nbytes = self.transport.moved_bytes
        holders = [worker for worker, _ in self._holders]
        return TransferReport(holders, shapes, nbytes, time.monotonic() - start)

    def restore(self, worker: Worker) -> int | None:
        """Give a server that is back the weights of the latest update; their version, or None where
        only the next update can. In the thread that watches."""
        with self._one_at_a_time:
            version, evictions = self.transport.latest, worker.evictions
            if version is None:
                return None
            if (worker, evictions) in self._holders:  # the update came first
                return version
            fleet = self.servers.fleet
            try:
                self.transport.restore(worker)
                has = fleet.ask(worker, "/model_info", weight_version, timeout_s=CONTROL_S)
                # it may have been lost while it was paused
                fleet.call(worker, "/continue_generation", {}, timeout_s=CONTROL_S)
            except (RequestFailed, UpdateIncomplete, RunError) as failure:
                logger.warning(
                    f"the engine {worker.url} did not get the current weights: {failure}"
                )
                return None
            if has != str(version):
                logger.warning(
                    f"the engine {worker.url} has weights of version {shown(has)} after it got {version}"
                )
                return None
            self._holders.append((worker, evictions))
            return version

    def close(self) -> None:
        self.transport.close()


def transport_of(settings: UpdateSettings) -> type[WeightTransport]:
    if settings.delta:
        from slime_like.rollout.engines.sglang.weight_transfer.delta import DeltaTransport

        return DeltaTransport
    return weight_transports.get(settings.transport)
