"""Adapters of sampling sessions on SGLang servers that keep the base model (--lora-sync adapter).

An adapter is loaded from its folder, under a name of its own, before the first request that needs
it, on every server.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from slime_like.engines.sglang.factory import UNCHANGED
from slime_like.servers.control_plane import of_each
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.server_api import ServerCall
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.tinker.sampler import read_adapter
from slime_like.tinker.sglang_snapshots import SnapshotTransport
from slime_like.weights.safetensors_reader import weights_digest

REFUSED = ("status_400", "no_success")  # kinds of failures that are the adapter's, not the server's
logger = logging.getLogger(__name__)


class KeptBaseTransport(SnapshotTransport):
    """Servers keep the base model that they were started with; an update is only its version."""

    def load_everywhere(self, folder: Path, version: int, workers: Sequence[Worker]) -> None:
        tell = self.servers.api.set_version(version)
        self.servers.on_each(
            workers, lambda worker: self.servers.call(worker, tell), "setting the weight version"
        )
        self._snapshot = (version, folder)

    def restore(self, worker: Worker) -> None:
        assert self._snapshot is not None, "asked where there is a latest version"
        self.servers.call(worker, self.servers.api.set_version(self._snapshot[0]))


class ServedAdapters:
    """The adapters that servers hold; on rank 0. At most `max_adapters`, or as many as a command
    needs: the least recently used one that it does not need makes room for the next."""

    def __init__(
        self,
        pool: ServerPool,
        base: str,
        *,
        max_adapters: int,
        timeout_s: float,
        others: bool = False,
    ) -> None:
        """
        Args:
            base: Folder of the model that the servers were started with.
            timeout_s: Of loading one.
            others: The servers live on after this process.
        """
        self._pool = pool
        self._max_adapters = max_adapters
        self._timeout_s = timeout_s
        self._others = others
        self._digest = weights_digest(base)
        self._prefix = f"slime_like-{os.getpid():x}-{time.time_ns():x}"
        self._numbers = itertools.count()
        self._names: OrderedDict[str, str] = OrderedDict()  # by folder
        # what each server has, and its eviction count at that time: it may have restarted since
        self._held: dict[Worker, tuple[int, set[str]]] = {}
        # and what it may have: all that it was asked to load, until it is known to be unloaded
        self._maybe_held: dict[Worker, set[str]] = {}

    def hold(self, folders: Sequence[str]) -> dict[str, str]:
        """Load what servers lack of these; returns the names for requests, by folder. A server that
        fails is evicted. Raises ValueError for a folder that is gone, or of another base model, and
        for an adapter that a server does not take."""
        for folder in folders:
            if folder not in self._names:
                read_adapter(folder, self._digest)
                self._names[folder] = f"{self._prefix}-{next(self._numbers)}"
            self._names.move_to_end(folder)
        unused = [folder for folder in self._names if folder not in folders]
        for folder in unused[: max(0, len(self._names) - self._max_adapters)]:
            self._unload(self._names.pop(folder))
        names = {folder: self._names[folder] for folder in folders}
        refusal = None
        for worker, failure in of_each(
            self._pool.ready(), lambda worker: self._load_missing(worker, names)
        ):
            if failure is not None and failure.kind in REFUSED:
                refusal = failure
            elif failure is not None:
                self._pool.evict(worker, f"loading an adapter: {failure}")
        if refusal is not None:
            raise ValueError(f"the SGLang server does not take the adapter: {refusal}")
        return names

    def close(self) -> None:
        """Leave servers of others as they were started."""
        if not self._others:
            return
        for name in sorted(set().union(*self._maybe_held.values())):
            self._unload(name)
        self._names.clear()
        tell = ServerCall(
            "/update_weight_version", {"new_version": UNCHANGED, "abort_all_requests": False}
        )
        for worker in self._pool.alive():
            try:
                self._pool.post(worker, tell, timeout_s=CONTROL_S)
            except RequestFailed as failure:
                logger.warning(f"the engine {worker.url} keeps its weight version: {failure}")

    def forget(self) -> None:
        """A server may lack what it had: load again with the next `hold`."""
        self._held.clear()

    def _load_missing(self, worker: Worker, names: dict[str, str]) -> None:
        """Raises RequestFailed."""
        evictions, held = self._held.get(worker, (worker.evictions, set()))
        if evictions != worker.evictions:
            held = set()
        self._held[worker] = (worker.evictions, held)
        for folder, name in names.items():
            if name not in held:
                call = self._pool.api.adapter_folder(name, Path(folder).absolute())
                self._maybe_held.setdefault(worker, set()).add(name)
                try:
                    self._pool.post(worker, call, timeout_s=self._timeout_s)
                except RequestFailed as failure:
                    if "already" not in str(failure):  # no other adapter has this name
                        raise
                held.add(name)

    def _unload(self, name: str) -> None:
        """From every server that may have it."""
        call = self._pool.api.unload_adapter(name)
        limit = min(CONTROL_S, self._pool.health.timeout_s)
        for worker, maybe_held in self._maybe_held.items():
            if name not in maybe_held:
                continue
            if worker in self._held:
                self._held[worker][1].discard(name)
            try:
                self._pool.post(worker, call, timeout_s=limit)
            except RequestFailed as failure:
                if name not in str(failure):  # which names it as unknown
                    if worker.alive:
                        logger.warning(f"an adapter stays on the engine {worker.url}: {failure}")
                    continue
            maybe_held.discard(name)
