"""Delta transport: write only changed weights to a shared folder (--update-weight-mode delta).

Each node with servers keeps a full copy that its servers load as an ordinary Hugging Face folder.
On this host the transport maintains it; on other hosts `slime-like pull-weights` does, and reports
its progress in the update folder.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from slime_like.checkpoints.scratch import scratch_folder
from slime_like.servers.http import RequestFailed
from slime_like.servers.server_pool import Worker
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.servers import Servers
from slime_like.weight_sync.transports.base import WeightTransport
from slime_like.weight_sync.transports.disk import load_folder
from slime_like.weights.delta_follow import copy_for
from slime_like.weights.delta_local import LocalCheckpoint
from slime_like.weights.delta_updates import Publication, Update, forget, remove_update, updates_in

POLL_S = 0.1
NO_COPY = "no_copy"  # failure kind
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class DeltaTransport(WeightTransport):
    """Sends deltas. The first update, every `full_interval`-th and the one after a failure are
    full; earlier updates are removed once the servers have loaded it."""

    restores = True

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        settings = servers.settings
        self._temporary: str | None = None
        if settings.disk_dir is None or settings.local_dir is None:
            self._temporary = scratch_folder("slime_like_weights_")
        self._root = Path(settings.disk_dir or f"{self._temporary}/updates")
        self._local = LocalCheckpoint(
            self._root, settings.local_dir or f"{self._temporary}/checkpoint"
        )
        self._run = uuid.uuid4().hex
        self._latest: Update | None = None
        self._full = 0  # number of the newest full update
        self._broken = True  # the ranks' state does not match the folder

    def before_stage(self, version: int) -> None:
        """See `WeightTransport`. This host's copy serves no server until the changes are in it."""
        self._latest = None

    def stage(self, ranks: SendingRanks, version: int) -> None:
        """See `WeightTransport`. The changes are written, and applied to the copy of this host."""
        number = max(updates_in(self._root), default=0) + 1
        full = self._broken or number - self._full >= self.servers.settings.full_interval
        publication = Publication(
            str(self._root),
            self.servers.hf_checkpoint,
            self._run,
            number,
            version,
            fresh=self._broken,
            full=full,
        )
        self._broken = True
        if ranks.multiple_senders:
            update = publication.write(ranks.order(publication))
        else:
            update = publication.write_alone(ranks.gathered())
        self._broken = False
        self.moved_bytes = update.nbytes
        self._full = number if full else self._full
        if any(is_here(worker) for worker in self.servers.pool.workers):
            self._local.update_to(number)
        self._latest = update

    def update(self, ranks: SendingRanks, version: int, workers: Sequence[Worker]) -> None:
        """See `WeightTransport`. The servers load their copies."""
        wait_s = self.servers.settings.timeout_s
        self.servers.on_each(
            workers, lambda worker: self._load(worker, wait_s), "loading weights from disk"
        )
        if not self.servers.settings.keep_files:
            for old in updates_in(self._root):
                if old < self._full:
                    remove_update(self._root, old)

    @property
    def latest(self) -> int | None:
        return None if self._latest is None else self._latest.version

    def restore(self, worker: Worker) -> None:
        """See `WeightTransport`. A server on a node that has no copy yet stays out until the next
        probe; updates do not wait for it."""
        try:
            self._load(worker, 0.0)
        except RequestFailed as failure:
            if failure.kind == NO_COPY:
                self.servers.pool.evict(worker, str(failure))
            raise

    def _load(self, worker: Worker, wait_s: float) -> None:
        assert self._latest is not None, "asked where there is a latest version"
        is_local = is_here(worker)
        folder = self._local.folder if is_local else self._remote_copy(worker, self._latest, wait_s)
        load_folder(self.servers, worker, folder, self._latest.version)

    def _remote_copy(self, worker: Worker, update: Update, wait_s: float) -> Path:
        """The folder on the server's node, after it has applied the update. Raises
        RequestFailed."""
        deadline = time.monotonic() + wait_s
        wanted = (update.run, update.number)
        while True:
            copy = copy_for(self._root, worker.url, wanted)
            if copy is not None and copy.update == wanted:
                return Path(copy.folder)
            if time.monotonic() >= deadline or not worker.alive:
                reason = "not running" if copy is None else copy.error or "late"
                raise RequestFailed(
                    NO_COPY,
                    f"{worker.url} needs weight version {update.version} from `slime-like "
                    f"pull-weights {self._root}` on its node: {reason}",
                    retryable=False,
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        forget(str(self._root))
        if self.servers.settings.disk_dir is not None and not self.servers.settings.keep_files:
            for number in updates_in(self._root):
                remove_update(self._root, number)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def is_here(worker: Worker) -> bool:
    """Whether the server listens on this host's loopback."""
    return urlsplit(worker.url).hostname in LOOPBACK
