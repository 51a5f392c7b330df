"""Control calls to all servers and checks of their weights. On rank 0, in the training thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slime_like.errors import RunError
from slime_like.rollout.engines.checked_json import shown
from slime_like.rollout.engines.sglang.control_answers import checksums, weight_version
from slime_like.rollout.engines.sglang.http import RequestFailed
from slime_like.rollout.engines.sglang.server_pool import Fleet, Worker
from slime_like.rollout.engines.sglang.weight_transfer.servers import CONTROL_S

logger = logging.getLogger(__name__)


def call_servers(
    fleet: Fleet, workers: Sequence[Worker], path: str, body: dict[str, object]
) -> None:
    """POST to all servers; a server that fails is evicted."""
    for worker in workers:
        try:
            fleet.call(worker, path, body, timeout_s=CONTROL_S)
        except RequestFailed as failure:
            fleet.evict(worker, str(failure))


def check_versions(fleet: Fleet, workers: Sequence[Worker], version: int) -> list[Worker]:
    """Check that every server reports `version`; returns the servers that respond. Raises RunError
    if one reports another version, or if none is left."""
    answering = []
    for worker in workers:
        try:
            has = fleet.ask(worker, "/model_info", weight_version, timeout_s=CONTROL_S)
        except RequestFailed as failure:
            fleet.evict(worker, str(failure))
            continue
        if has != str(version):
            raise RunError(
                f"the engine {worker.url} has weights of version {shown(has)} after an update to {version}; does another run use it?"
            )
        answering.append(worker)
    if not answering:
        raise RunError(f"no engine is left after the update to version {version}")
    return answering


def check_alike(fleet: Fleet, workers: Sequence[Worker]) -> None:
    """Check that servers of equal tensor-parallel size report equal weight checksums; otherwise
    raise RunError. Servers without the endpoint are skipped."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for worker in workers:
        try:
            body = {"action": "checksum"}
            sums = fleet.ask(
                worker, "/weights_checker", checksums, timeout_s=10 * CONTROL_S, body=body
            )
        except RequestFailed as failure:
            logger.warning(f"the engine {worker.url} gives no checksums of its weights: {failure}")
            continue
        other = found.setdefault(tuple(sorted(sums)), sums)
        different = [name for name in sums if sums[name] != other[name]]
        if different:
            raise RunError(
                f"the engine {worker.url} has other weights than the first engine after the same update: {', '.join(different[:8])}"
            )


class ColocatedMemory:
    """GPU memory shared by servers and trainer under --colocate; the trainer has it while it
    trains. fleet: on rank 0, None elsewhere."""

    def __init__(self, fleet: Fleet | None) -> None:
        self._fleet = fleet
        # servers that released their memory, with their eviction counts at that time
        self._lent: list[tuple[Worker, int]] | None = None

    def release(self) -> None:
        """Make the servers release weights and KV cache."""
        if self._lent is None:
            self._lent = []
            if self._fleet is not None:
                call_servers(self._fleet, self._fleet.alive(), "/release_memory_occupation", {})
                self._lent = [(worker, worker.evictions) for worker in self._fleet.alive()]

    def resume(self) -> None:
        """Make the servers reallocate their memory; weights are synced afterwards. Servers
        restarted since `release` are skipped: they never released memory, and resuming would crash
        them."""
        lent, self._lent = self._lent, None
        if lent and self._fleet is not None:
            workers = [
                worker
                for worker, evictions in lent
                if worker.alive and worker.evictions == evictions
            ]
            call_servers(self._fleet, workers, "/resume_memory_occupation", {})
