"""Disk transport: a Hugging Face folder on a path that trainer and servers share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.checkpoints.scratch import scratch_folder
from slime_like.servers.server_pool import Worker
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.servers import Servers
from slime_like.weight_sync.transports.base import WeightTransport
from slime_like.weights.gather import WeightStream
from slime_like.weights.hf_save import save_hf, write_hf

FILE_BYTES = 2**29  # a larger model is split into several files, written by all ranks


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Order to write a Hugging Face folder on all ranks; see `save_hf`."""

    folder: str
    source: str

    def assist(self, weights: WeightStream) -> None:
        save_hf(self.folder, weights, self.source, FILE_BYTES)


class DiskTransport(WeightTransport):
    restores = True

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        settings = servers.settings
        self._keep_files = settings.keep_files
        self._temporary = (
            scratch_folder("slime_like_weights_") if settings.disk_dir is None else None
        )
        self._root = Path(self._temporary or str(settings.disk_dir))
        self._snapshot: tuple[int, Path] | None = None  # version, folder

    def before_stage(self, version: int) -> None:
        """See `WeightTransport`. The version before has a folder of its own."""
        if self._snapshot is not None and self._snapshot[0] == version:  # sent once more
            self._snapshot = None

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """See `WeightTransport`. Every rank writes its weights."""
        folder = self._folder(version)
        save = SaveOrder(str(folder), self.servers.hf_checkpoint)
        if ranks.multiple_senders:
            save.assist(ranks.order(save))
        else:
            write_hf(folder, ranks.gathered(), Path(self.servers.hf_checkpoint))

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """See `WeightTransport`. The servers load what is written."""
        folder = self._folder(version)
        before = self._snapshot
        self.load_everywhere(folder, version, workers)
        if before is not None and before[1] != folder and not self._keep_files:
            shutil.rmtree(before[1], ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self._root / f"version-{version}"

    def load_everywhere(self, folder: Path, version: int, workers: Sequence[Worker]) -> None:
        self.servers.on_each(
            workers,
            lambda worker: load_folder(self.servers, worker, folder, version),
            "loading weights from disk",
        )
        self._snapshot = (version, folder)

    @property
    def latest(self) -> int | None:
        return None if self._snapshot is None else self._snapshot[0]

    def restore(self, worker: Worker) -> None:
        assert self._snapshot is not None, "asked where there is a latest version"
        load_folder(self.servers, worker, self._snapshot[1], self._snapshot[0])

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif self._snapshot is not None and not self._keep_files:
            shutil.rmtree(self._snapshot[1], ignore_errors=True)


def load_folder(servers: Servers, worker: Worker, folder: Path, version: int) -> None:
    """Make a server load the folder. Raises RequestFailed."""
    servers.call(worker, *servers.api.load_folder(folder.absolute(), version))
