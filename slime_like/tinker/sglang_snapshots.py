"""How SGLang servers of the Tinker server get whole weights: from the folder of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.transports.disk import DiskTransport
from slime_like.weight_sync.updater import WeightUpdater


class SnapshotTransport(DiskTransport):
    """Transport for weights that are already on disk. folder: source of the next update."""

    folder = Path()

    def stage(self, ranks: SendingRanks, version: int) -> None:
        for _ in ranks.gathered():  # names and shapes, to compare with the base model
            pass

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        self.load_everywhere(self.folder, version, workers)


def snapshot_updater(
    pool: ServerPool,
    base: str,
    folder: Path,
    timeout_s: float,
    transport: type[SnapshotTransport] = SnapshotTransport,
) -> WeightUpdater:
    """An updater that loads snapshots. base: the folder that the servers were started with."""
    settings = UpdateSettings("disk", timeout_s=timeout_s, disk_dir=str(folder), keep_files=True)
    return WeightUpdater(pool, settings, base, torch.device("cpu"), transport)


def snapshot_transport(updater: WeightUpdater | None) -> SnapshotTransport | None:
    """The transport of a `snapshot_updater`; None except on rank 0."""
    if updater is None:
        return None
    assert isinstance(updater.transport, SnapshotTransport)
    return updater.transport
