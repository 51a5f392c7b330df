"""Control calls to all servers and checks of their weights. On rank 0, in the training thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slime_like.errors import RunError
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.server_api import ServerCall
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.text import list_names, shown

logger = logging.getLogger(__name__)
T = TypeVar("T")


def of_each(
    workers: Sequence[Worker], call: Callable[[Worker], T]
) -> Iterator[tuple[Worker, T | RequestFailed]]:
    """Every server with what `call` returns for it, or with the failure of its request. The calls
    are concurrent."""
    with ThreadPoolExecutor(max_workers=max(1, len(workers))) as threads:
        pending = [(worker, threads.submit(call, worker)) for worker in workers]
        for worker, future in pending:
            try:
                answer: T | RequestFailed = future.result()
            except RequestFailed as failure:
                answer = failure
            yield worker, answer


def call_servers(pool: ServerPool, workers: Sequence[Worker], call: ServerCall) -> None:
    """POST to all servers; a server that fails is evicted."""

    def post(worker: Worker) -> object:
        return pool.post(worker, call, timeout_s=CONTROL_S)

    for worker, answer in of_each(workers, post):
        if isinstance(answer, RequestFailed):
            pool.evict(worker, str(answer))


def check_versions(pool: ServerPool, workers: Sequence[Worker], version: int) -> list[Worker]:
    """Check that every server reports `version`; returns the servers that respond. Raises RunError
    if one reports another version, or if none is left."""
    responding = []
    for worker, reported in of_each(workers, pool.weight_version):
        if isinstance(reported, RequestFailed):
            pool.evict(worker, str(reported))
            continue
        if reported != str(version):
            raise RunError(
                f"the engine {worker.url} reports weight version {shown(reported)} after an update "
                f"to {version}; does another run use it?"
            )
        responding.append(worker)
    if not responding:
        raise RunError(f"no engine is left after the update to version {version}")
    return responding


def check_equal_weights(pool: ServerPool, workers: Sequence[Worker]) -> None:
    """Check that servers of equal tensor-parallel size report equal weight checksums; otherwise
    raise RunError. Servers without the endpoint are skipped."""
    reference: dict[tuple[str, ...], dict[str, str]] = {}
    for worker, sums in of_each(workers, pool.checksums):
        if isinstance(sums, RequestFailed):
            logger.warning(f"the engine {worker.url} gives no checksums of its weights: {sums}")
            continue
        expected = reference.setdefault(tuple(sorted(sums)), sums)
        different = [name for name in sums if sums[name] != expected[name]]
        if different:
            raise RunError(
                f"the engine {worker.url} has other weights than the first engine after the same "
                f"update: {list_names(different)}"
            )


class ColocatedMemory:
    """GPU memory shared by servers and trainer under --colocate; the trainer has it while it
    trains. pool: on rank 0, None elsewhere."""

    def __init__(self, pool: ServerPool | None) -> None:
        self._pool = pool
        # servers that released their memory, with their eviction counts at that time
        self._released: list[tuple[Worker, int]] | None = None

    def release(self) -> None:
        """Make the servers release weights and KV cache."""
        if self._released is None:
            self._released = []
            if self._pool is not None:
                call_servers(
                    self._pool, self._pool.alive(), ServerCall("/release_memory_occupation")
                )
                self._released = [(worker, worker.evictions) for worker in self._pool.alive()]

    def resume(self) -> None:
        """Make the servers reallocate their memory; weights are synced afterwards. Servers
        restarted since `release` are skipped: they never released memory, and resuming would crash
        them."""
        released = self._released
        self._released = None
        if released and self._pool is not None:
            workers = [w for w, evictions in released if w.alive and w.evictions == evictions]
            call_servers(self._pool, workers, ServerCall("/resume_memory_occupation"))
