"""New weights for all servers: bracketed, bounded, versioned, over one of four ways."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from slime_like.checkpoints.scratch import scratch_folder
from slime_like.errors import RunError
from slime_like.rollout.engines.checked_json import shown
from slime_like.rollout.engines.sglang.broadcast import BroadcastFailed, BroadcastGroup
from slime_like.rollout.engines.sglang.buckets import Bucket, in_buckets
from slime_like.rollout.engines.sglang.control_answers import tensor_parallel_size, weight_version
from slime_like.rollout.engines.sglang.http import RequestFailed
from slime_like.rollout.engines.sglang.processes import ServerProcess
from slime_like.rollout.engines.sglang.server_pool import Fleet, Worker
from slime_like.rollout.engines.sglang.tensor_update import tensor_update
from slime_like.weights.hf_save import write_hf

logger = logging.getLogger(__name__)

Transport = Literal["broadcast", "disk", "cuda_ipc", "tensor"]
CONTROL_S = 30.0  # of calls that move no weights


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """transport: how. buffer_bytes: of one message. timeout_s: for one message, or for a load from
    disk. disk_dir: shared with the servers; None: a temporary folder of this host. keep_copy: with
    broadcast, the weights stay in this process's memory for a server that comes late."""

    transport: Transport = "broadcast"
    buffer_bytes: int = 512 * 2**20
    timeout_s: float = 300.0
    disk_dir: str | None = None
    keep_files: bool = False
    keep_copy: bool = True


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What an update moved. workers: that have it. shapes: of every weight, by name. seconds: of
    the moving alone."""

    workers: list[Worker]
    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    seconds: float


class WeightUpdater:
    """On rank 0, which talks to the servers. The other ranks only take their steps of the stream."""

    def __init__(
        self, fleet: Fleet, settings: UpdateSettings, hf_checkpoint: str, device: torch.device
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._hf_checkpoint = hf_checkpoint
        self._device = device
        self._group: BroadcastGroup | None = None
        # of the group; a server that was started again, or was out, is another one
        self._members: list[tuple[Worker, ServerProcess | None, int]] = []
        self._groups_made = 0
        self._temporary = (
            scratch_folder("slime_like_weights_") if settings.disk_dir is None else None
        )
        self._snapshot: tuple[int, Path] | None = None  # version, folder
        self._copy: tuple[int, list[tuple[str, Tensor]]] | None = None  # version, weights
        self._holders: list[
            tuple[Worker, int]
        ] = []  # servers with the weights of the latest update, and how often each had been out
        self._one_at_a_time = (
            threading.Lock()
        )  # an update by the training thread, or a server that gets weights by the one that watches
        if settings.transport == "disk" or (
            settings.transport == "broadcast" and settings.keep_copy
        ):
            fleet.restore = self.restore

    def update(self, weights: Iterator[tuple[str, Tensor]], version: int) -> TransferReport:
        """Returns when every server that is still in the fleet has the weights; one that fails is
        evicted. Raises UpdateIncomplete when the update is to be made again, RunError when none is
        left."""
        with self._one_at_a_time:
            return self._update(weights, version)

    def _update(self, weights: Iterator[tuple[str, Tensor]], version: int) -> TransferReport:
        workers = self._fleet.alive()
        evictions = [worker.evictions for worker in workers]
        shapes: dict[str, tuple[int, ...]] = {}
        nbytes = 0
        copy: list[tuple[str, Tensor]] = []
        keep = self._settings.transport == "broadcast" and self._settings.keep_copy
        self._copy = None  # never two in memory
        self._holders = []

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal nbytes
            for name, tensor in weights:
                shapes[name] = tuple(tensor.shape)
                nbytes += tensor.nbytes
                if keep:
                    copy.append((name, tensor.detach().to("cpu", copy=True)))
                yield name, tensor

        start = time.monotonic()
        if self._settings.transport == "disk":
            self._from_disk(counted(), version, workers)
        else:
            self._in_session(workers, lambda ready: self._move(counted(), version, ready))
        self._copy = (version, copy) if keep else None
        # One that was out meanwhile, and is back, has old weights or none.
        self._holders = [
            (w, before)
            for w, before in zip(workers, evictions, strict=True)
            if w.alive and w.evictions == before
        ]
        return TransferReport(
            [worker for worker, _ in self._holders], shapes, nbytes, time.monotonic() - start
        )

    def restore(self, worker: Worker) -> int | None:
        """Give a server that is back the weights of the latest update; their version, or None where
        only the next update can. In the thread that watches."""
        with self._one_at_a_time:
            newest = self._snapshot or self._copy
            if newest is None:
                return None
            version, evictions = newest[0], worker.evictions
            if (worker, evictions) in self._holders:  # the update came first
                return version
            try:
                if self._snapshot is not None:
                    self._load_from_disk(worker, self._snapshot[1], version)
                else:
                    assert self._copy is not None
                    self._broadcast_to(worker, version, self._copy[1])
                has = self._fleet.ask(worker, "/model_info", weight_version, timeout_s=CONTROL_S)
                self._fleet.call(
                    worker, "/continue_generation", {}, timeout_s=CONTROL_S
                )  # it may have been lost while it was paused
            except (RequestFailed, BroadcastFailed, UpdateIncomplete, RunError) as failure:
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

    def _broadcast_to(
        self, worker: Worker, version: int, weights: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Over a group of its own: the others go on generating."""
        self._begin(worker)
        group = self._new_group([worker])
        try:
            for bucket in in_buckets(iter(weights), self._settings.buffer_bytes):
                group.send(bucket, version)
        except BroadcastFailed:
            group.abandon()
            raise
        group.close()
        self._fleet.call(worker, "/end_weight_update", {}, timeout_s=self._settings.timeout_s)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif self._snapshot is not None and not self._settings.keep_files:
            shutil.rmtree(self._snapshot[1], ignore_errors=True)

    # --- from disk

    def _from_disk(
        self, weights: Iterator[tuple[str, Tensor]], version: int, workers: Sequence[Worker]
    ) -> None:
        root = Path(self._temporary or str(self._settings.disk_dir))
        folder = root / f"version-{version}"
        write_hf(folder, weights, Path(self._hf_checkpoint))
        before = self._snapshot
        self._load_everywhere(folder, version, workers)
        if before is not None and before[1] != folder and not self._settings.keep_files:
            shutil.rmtree(before[1], ignore_errors=True)

    def _load_everywhere(self, folder: Path, version: int, workers: Sequence[Worker]) -> None:
        self._evict_failures(
            workers,
            lambda worker: self._load_from_disk(worker, folder, version),
            "loading weights from disk",
        )
        self._snapshot = (version, folder)

    def _load_from_disk(self, worker: Worker, folder: Path, version: int) -> None:
        body = {
            "model_path": str(folder.absolute()),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        self._fleet.call(
            worker, "/update_weights_from_disk", body, timeout_s=self._settings.timeout_s
        )

    # --- over a group, or in requests

    def _in_session(
        self, workers: Sequence[Worker], move: Callable[[Sequence[Worker]], None]
    ) -> None:
        """begin_weight_update ... end_weight_update on all servers."""
        ready = self._evict_failures(workers, self._begin, "beginning a weight update")
        move(ready)
        self._evict_failures(
            [w for w in ready if w.alive], lambda w: self._fleet.call(w, "/end_weight_update", {}, timeout_s=self._settings.timeout_s),
            "ending a weight update",
        )  # fmt: skip

    def _begin(self, worker: Worker) -> None:
        """A server that was left inside a session, by another run or when it was lost, is freed
        first."""
        try:
            self._fleet.call(worker, "/begin_weight_update", {}, timeout_s=CONTROL_S)
        except RequestFailed as failure:
            if "already open" not in str(failure):
                raise
            self._fleet.call(worker, "/end_weight_update", {}, timeout_s=CONTROL_S)
            self._fleet.call(worker, "/begin_weight_update", {}, timeout_s=CONTROL_S)

    def _move(
        self, weights: Iterator[tuple[str, Tensor]], version: int, workers: Sequence[Worker]
    ) -> None:
        if self._settings.transport != "broadcast":
            self._move_in_requests(weights, version, workers)
            return
        group = self._group_of(workers)
        for bucket in in_buckets(weights, self._settings.buffer_bytes):
            try:
                group.send(bucket, version)
            except BroadcastFailed as failure:
                self._group = None
                group.abandon()
                self._blame(failure, workers)

    def _move_in_requests(
        self, weights: Iterator[tuple[str, Tensor]], version: int, workers: Sequence[Worker]
    ) -> None:
        """A server that fails with one bucket gets no other."""
        sizes = dict(zip(map(id, workers), self._sizes(workers), strict=True))
        device = self._device if self._settings.transport == "cuda_ipc" else torch.device("cpu")
        for bucket in in_buckets(weights, self._settings.buffer_bytes):
            flat = bucket.flat().to(device)

            def send(worker: Worker, bucket: Bucket = bucket, flat: Tensor = flat) -> None:
                body = tensor_update(bucket, flat, version, sizes[id(worker)])
                self._fleet.call(
                    worker, "/update_weights_from_tensor", body, timeout_s=self._settings.timeout_s
                )

            workers = self._evict_failures(workers, send, "a bucket of weights")
            if device.type == "cuda":
                torch.cuda.ipc_collect()  # the memory of handles that the servers have let go of

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
            self._blame(failure, workers)
        self._members = members
        assert self._group is not None
        return self._group

    def _new_group(self, workers: Sequence[Worker]) -> BroadcastGroup:
        self._groups_made += 1
        backend = "nccl" if self._device.type == "cuda" else "gloo"

        def call_of(worker: Worker) -> Callable[[str, dict[str, Any]], Any]:
            return lambda path, body: self._fleet.call(
                worker, path, body, timeout_s=self._settings.timeout_s
            )

        return BroadcastGroup(
            f"slime_like_weights_{time.time_ns():x}_{self._groups_made}", [w.url for w in workers], [call_of(w) for w in workers],
            self._sizes(workers), backend, self._device, self._settings.timeout_s,
        )  # fmt: skip

    def _sizes(self, workers: Sequence[Worker]) -> list[int]:
        """Tensor-parallel ranks of each. One that does not answer is evicted, and this update given
        up."""
        sizes = []
        for worker in workers:
            try:
                sizes.append(self._size(worker))
            except RequestFailed as failure:
                self._fleet.evict(worker, str(failure))
                raise UpdateIncomplete(str(failure)) from None
        return sizes

    def _size(self, worker: Worker) -> int:
        """Raises RequestFailed."""
        size = self._fleet.ask(worker, "/server_info", tensor_parallel_size, timeout_s=CONTROL_S)
        if size is None:
            raise RunError(
                f"the engine {worker.url} is pipeline- or data-parallel: weights can only reach it with --update-weight-transport disk"
            )
        return size

    # --- failures

    def _blame(self, failure: BroadcastFailed, workers: Sequence[Worker]) -> None:
        """Evict those that failed, or all of them where that is not known, and give this update up."""
        alive = [w for i, w in enumerate(workers) if i not in failure.servers]
        unreachable = [w for w in alive if not self._reachable(w)]
        named = [workers[i] for i in failure.servers] + unreachable
        for worker in named or list(workers):
            self._fleet.evict(worker, str(failure))
        raise UpdateIncomplete(str(failure)) from None

    def _reachable(self, worker: Worker) -> bool:
        return self._fleet.answers(worker, min(CONTROL_S, self._fleet.health.timeout_s))

    def _evict_failures(
        self, workers: Sequence[Worker], call: Callable[[Worker], object], what: str
    ) -> list[Worker]:
        """`call` for all workers at the same time; those for which it succeeded. When it failed for
        every one, raises UpdateIncomplete if one of
        them is started again, else RunError."""
        if not workers:
            self._none_left(f"{what}: no engine is left")
        failures: list[str] = []
        succeeded: list[Worker] = []
        with ThreadPoolExecutor(max_workers=len(workers)) as threads:
            pending = [(worker, threads.submit(call, worker)) for worker in workers]
            for worker, future in pending:
                try:
                    future.result()
                    succeeded.append(worker)
                except RequestFailed as failure:
                    failures.append(str(failure))
                    self._fleet.evict(worker, f"{what}: {failure}")
        if len(failures) == len(workers):
            self._none_left(f"{what} failed on every engine: " + "; ".join(failures))
        return succeeded

    def _none_left(self, words: str) -> NoReturn:
        if self._fleet.starts_again():
            raise UpdateIncomplete(words)
        raise RunError(words)


class UpdateIncomplete(RuntimeError):
    """Not every server got the weights; those that failed are evicted. The update has to be made
    again, for the others."""
