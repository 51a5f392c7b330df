"""Server calls of a weight transport, with time limits and eviction of servers that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from slime_like.errors import RunError
from slime_like.servers.control_plane import of_each
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.server_api import ServerCall
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.weight_sync.settings import UpdateSettings


class UpdateIncomplete(RuntimeError):
    """Some servers failed and were evicted; the update has to be repeated for the others."""


class Servers:
    """The servers of a weight update.

    Args:
        hf_checkpoint: Folder that the servers were started with.
        device: Device of the trainer's weights.
    """

    def __init__(
        self, pool: ServerPool, settings: UpdateSettings, hf_checkpoint: str, device: torch.device
    ) -> None:
        self.pool = pool
        self.api = pool.api
        self.settings = settings
        self.hf_checkpoint = hf_checkpoint
        self.device = device

    def call(self, worker: Worker, *calls: ServerCall) -> None:
        """POST each with the time limit of a weight bucket. Raises RequestFailed."""
        for call in calls:
            self.pool.post(worker, call, timeout_s=self.settings.timeout_s)

    def on_each(
        self, workers: Sequence[Worker], call: Callable[[Worker], object], what: str
    ) -> list[Worker]:
        """Run `call` for all workers concurrently; returns those that succeeded. If all failed,
        raises UpdateIncomplete if one of them is being restarted, otherwise RunError."""
        if not workers:
            self.raise_none_left(f"{what}: no engine is left")
        failures: list[str] = []
        succeeded: list[Worker] = []
        for worker, answer in of_each(workers, call):
            if isinstance(answer, RequestFailed):
                failures.append(str(answer))
                self.pool.evict(worker, f"{what}: {answer}")
            else:
                succeeded.append(worker)
        if len(failures) == len(workers):
            self.raise_none_left(f"{what} failed on every engine: " + "; ".join(failures))
        return succeeded

    def in_session(
        self, workers: Sequence[Worker], version: int, move: Callable[[Sequence[Worker]], None]
    ) -> None:
        """Run `move` between the begin and the end of an update to `version` on all servers."""
        ready = self.on_each(workers, self.begin, "beginning a weight update")
        move(ready)
        self.on_each(
            [w for w in ready if w.alive],
            lambda worker: self.end(worker, version),
            "ending a weight update",
        )

    def begin(self, worker: Worker) -> None:
        """Begin an update session. A stale session (of another run, or from before an eviction) is
        ended first."""
        try:
            self.pool.post(worker, self.api.begin, timeout_s=CONTROL_S)
        except RequestFailed as failure:
            if "already open" not in str(failure):
                raise
            self.call(worker, *self.api.end(self.pool.version))
            self.pool.post(worker, self.api.begin, timeout_s=CONTROL_S)

    def end(self, worker: Worker, version: int) -> None:
        self.call(worker, *self.api.end(version))

    def sizes(self, workers: Sequence[Worker]) -> list[int]:
        """Tensor-parallel size of each server. One that does not respond is evicted and ends this
        update."""
        sizes = []
        for worker, size in of_each(workers, self.size):
            if isinstance(size, RequestFailed):
                self.pool.evict(worker, str(size))
                raise UpdateIncomplete(str(size))
            sizes.append(size)
        return sizes

    def size(self, worker: Worker) -> int:
        """Tensor-parallel size of a server. Raises RequestFailed."""
        sizes = self.pool.sizes(worker)
        if (sizes.pipeline, sizes.data) != (1, 1):
            raise RunError(
                f"the engine {worker.url} is pipeline- or data-parallel, which requires "
                "--update-weight-transport disk"
            )
        return sizes.tensor

    def abort_update(
        self, error: Exception, failed: Sequence[Worker], workers: Sequence[Worker]
    ) -> NoReturn:
        """Evict the servers that failed or no longer respond (all, if that is unknown) and raise
        UpdateIncomplete."""
        others = [w for w in workers if w not in failed]
        unreachable = [*failed, *(w for w in others if not self._reachable(w))]
        for worker in unreachable or list(workers):
            self.pool.evict(worker, str(error))
        raise UpdateIncomplete(str(error)) from None

    def _reachable(self, worker: Worker) -> bool:
        limit = min(CONTROL_S, self.pool.health.timeout_s)
        return self.pool.is_healthy(worker, limit, self.api.bare_probe)

    def raise_none_left(self, message: str) -> NoReturn:
        if self.pool.can_restart_any():
            raise UpdateIncomplete(message)
        raise RunError(message)
