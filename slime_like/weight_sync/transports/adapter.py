"""Sends a LoRA adapter to servers that hold the base model themselves (--lora-sync adapter).

Every update is an adapter under a name of its own, so nothing is replaced: a request keeps the
adapter that it began with, and servers neither pause nor recompute anything. An adapter is unloaded
once a newer one is there and no request uses it any more.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from arguments.hf.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config
from slime_like.checkpoints.scratch import scratch_folder
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.processes import EngineProcess
from slime_like.servers.server_pool import ServedAdapter, Worker
from slime_like.weight_sync.servers import Servers
from slime_like.weight_sync.transports.base import WeightTransport, transport_traits
from slime_like.weights.buckets import Bucket, WeightBuckets
from slime_like.weights.export_plan import TensorPlan
from slime_like.weights.safetensors_writer import save_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """An adapter as servers get it."""

    served: ServedAdapter
    config: Mapping[str, object]  # PEFT's adapter_config.json
    bucket: Bucket  # all factors by PEFT's names, in host memory
    folder: Path | None  # where they are, if servers load them from disk


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """Where an adapter may be, also after a load that failed or went unanswered."""

    served: ServedAdapter
    folder: Path | None
    # servers, with their process at that time; another process does not have the adapter
    workers: dict[Worker, EngineProcess | None]


class AdapterTransport(WeightTransport):
    """Inside the requests, or with --update-weight-transport disk in a folder of PEFT's format.
    Rank 0 keeps the latest adapter, for servers that join late."""

    restores = True

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        settings = servers.settings
        assert settings.adapter is not None
        self._adapter = settings.adapter
        self._temporary: str | None = None
        self._root: Path | None = None
        if transport_traits(settings.transport).uses_folder:
            if settings.disk_dir is None:
                self._temporary = scratch_folder("slime_like_adapters_")
            self._root = Path(self._temporary or str(settings.disk_dir))
        self._prefix = f"slime_like-{os.getpid():x}-{time.time_ns():x}"
        self._numbers = 0  # counter for unique names
        self._latest: SentAdapter | None = None
        self._traces: list[Traces] = []  # the latest adapter's too

    def send(self, weights: WeightBuckets, version: int, workers: Sequence[Worker]) -> None:
        adapter = self._new(weights, version)
        traces = Traces(adapter.served, adapter.folder, {w: w.process for w in workers})
        self._traces.append(traces)
        self.servers.on_each(
            workers, lambda worker: self._load(worker, adapter), "loading an adapter"
        )
        self._latest = adapter
        with self.servers.pool.lock:
            self.servers.pool.adapter = adapter.served
        self._unload_unused(self.servers.pool.alive())

    def _new(self, weights: WeightBuckets, version: int) -> SentAdapter:
        tensors: list[TensorPlan] = []
        parts: list[Tensor] = []
        for bucket in weights.buckets():
            tensors += bucket.tensors
            parts.append(bucket.flat.to("cpu"))
            del bucket  # free it before the next one is built
        self._numbers += 1
        name = f"{self._prefix}-{self._numbers}-version-{version}"
        config = adapter_config(
            rank=self._adapter.rank,
            alpha=self._adapter.alpha,
            # "base_model.model.<path>.<module>.lora_A.weight"
            modules=sorted({tensor.name.split(".")[-3] for tensor in tensors}),
            base_model=self.servers.hf_checkpoint,
        )
        whole = Bucket(tuple(tensors), torch.cat(parts), is_last=True)
        folder = None if self._root is None else self._root / name
        if folder is not None:
            folder.mkdir(parents=True)
            save_tensors(folder / ADAPTER_WEIGHTS, dict(whole.weights), {"format": "pt"})
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        return SentAdapter(ServedAdapter(name, version), config, whole, folder)

    def _load(self, worker: Worker, adapter: SentAdapter) -> None:
        """Raises RequestFailed."""
        api = self.servers.api
        name = adapter.served.name
        try:
            if adapter.folder is None:
                call = api.adapter_bucket(
                    name, adapter.config, adapter.bucket, self.servers.size(worker)
                )
            else:
                call = api.adapter_folder(name, adapter.folder.absolute())
            self.servers.call(worker, call)
        except RequestFailed as failure:
            # a server that was only out of reach for a while; no other adapter has this name
            if "already" not in str(failure):
                raise
        self.servers.call(worker, api.set_version(adapter.served.version))

    def _unload_unused(self, workers: Sequence[Worker]) -> None:
        """Unload from these servers what is neither the latest adapter nor in use."""
        with self.servers.pool.lock:
            kept = set(self.servers.pool.adapters_in_use)
        if self._latest is not None:
            kept.add(self._latest.served)
        for traces in [t for t in self._traces if t.served not in kept]:
            self._unload(traces, workers)

    def _unload(self, traces: Traces, workers: Sequence[Worker]) -> None:
        """Unload an adapter from those of `workers` that may have it. What fails, and servers that
        are away, come again with the next update or when the server is back."""
        call = self.servers.api.unload_adapter(traces.served.name)
        limit = min(CONTROL_S, self.servers.pool.health.timeout_s)
        for worker, process in list(traces.workers.items()):
            ended = process is not None and process.exit_status is not None
            if worker.process is not process or ended:
                del traces.workers[worker]
            elif worker in workers:
                try:
                    self.servers.pool.post(worker, call, timeout_s=limit)
                except RequestFailed as failure:
                    if traces.served.name not in str(failure):  # which names it as unknown
                        logger.warning(f"an adapter stays on the engine {worker.url}: {failure}")
                        continue
                del traces.workers[worker]
        if not traces.workers:
            self._traces.remove(traces)
            self._remove_folder(traces)

    def _remove_folder(self, traces: Traces) -> None:
        if traces.folder is not None and not self.servers.settings.keep_files:
            shutil.rmtree(traces.folder, ignore_errors=True)

    @property
    def latest(self) -> int | None:
        return None if self._latest is None else self._latest.served.version

    def restore(self, worker: Worker) -> None:
        assert self._latest is not None, "asked where there is a latest version"
        self._unload_unused([worker])
        for traces in self._traces:
            if traces.served == self._latest.served:
                traces.workers[worker] = worker.process
        self._load(worker, self._latest)

    def close(self) -> None:
        """Servers that others started go on without the run's adapters."""
        limit = min(CONTROL_S, self.servers.pool.health.timeout_s)
        external = [
            worker
            for worker in self.servers.pool.workers
            if worker.process is None
            and (worker.alive or self.servers.pool.is_healthy(worker, limit))
        ]
        for traces in list(self._traces):
            self._unload(traces, external)
        for traces in self._traces:
            self._remove_folder(traces)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
