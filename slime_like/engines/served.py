"""Servers as a rollout engine. Rank 0 sends all requests; all ranks take part in weight sync."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from slime_like.checked_json import InvalidResponse
from slime_like.distributed.collectives import from_rank_zero, share
from slime_like.engines.base import GenerateOutput, GenerateRequest, RolloutEngine, SamplingParams
from slime_like.errors import RunError
from slime_like.servers.control_plane import (
    ColocatedMemory,
    call_servers,
    check_equal_weights,
    check_versions,
)
from slime_like.servers.http import RequestFailed, async_client, post_once
from slime_like.servers.indexer_topk import IndexerFormat
from slime_like.servers.node_agent import NodeAgent
from slime_like.servers.requests import POLL_S, RequestSettings, ServerRequests
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.servers.server_api import Legal, RefusedByServer, ServerCall
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.servers.weight_spec import compare_with_checkpoint, vocabulary_size
from slime_like.weight_sync.senders import SendingRanks
from slime_like.weight_sync.servers import UpdateIncomplete
from slime_like.weight_sync.transports.broadcast_ranks import leave_group
from slime_like.weight_sync.updater import WeightUpdater
from slime_like.weights.export_plan import DEFAULT_BUCKET_BYTES

logger = logging.getLogger(__name__)


class ServedEngine(RolloutEngine):
    """`RolloutEngine` over HTTP.

    Args:
        pool, updater: On rank 0, None elsewhere.
        left_out: Parts of the names of weights that updates leave as servers have loaded them.
        routed_experts: Format of routed experts, None for a dense model.
        indexer_topk: Format of selected keys, None for a model without indexers.
        agent: On the first rank of every other node, the agent of its servers.
        takes_adapter: Servers keep the base model, and updates are adapters.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        updater: WeightUpdater | None,
        requests: RequestSettings,
        hf_checkpoint: str,
        *,
        check_updates: bool,
        left_out: Sequence[str] = (),
        colocated: bool = False,
        routed_experts: RoutesFormat | None = None,
        indexer_topk: IndexerFormat | None = None,
        agent: NodeAgent | None = None,
        takes_adapter: bool = False,
    ) -> None:
        self.serves_all_ranks = self.is_remote = True
        self.takes_adapter = takes_adapter
        self.pool = pool
        self._updater = updater
        self._agent = agent
        self._bucket_bytes = DEFAULT_BUCKET_BYTES
        if updater is not None:
            self._bucket_bytes = updater.servers.settings.buffer_bytes
        self._hf_checkpoint = hf_checkpoint
        self._check_updates = check_updates
        self._left_out = list(left_out)
        self._memory = ColocatedMemory(pool) if colocated else None
        self._settings = requests
        self._vocab_size = vocabulary_size(hf_checkpoint)
        self._requests: ServerRequests | None = None
        if pool is not None:
            self._requests = ServerRequests(
                pool, requests, self._vocab_size, routed_experts, indexer_topk
            )
        self._paused = False
        self._metrics: dict[str, float] = {}

    # --- requests

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        requests = self._rank_zero_requests()
        if self.weight_version < 0 and not requests.updating:
            raise RuntimeError(
                "the engines have no complete weights: the first or latest update_weights did not "
                "succeed"
            )
        return await requests.generate_one(request, sampling)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        if self._requests is not None:
            await self._requests.abort(sample_ids)

    async def leave_loop(self) -> None:
        if self._requests is not None:
            await self._requests.leave_loop()

    def _rank_zero_requests(self) -> ServerRequests:
        assert self._requests is not None, "only rank 0 sends requests"
        return self._requests

    # --- weights

    def pause(self) -> None:
        """Pause generation. Requests stay on the servers: their KV cache is recomputed with the new
        weights after `resume`. With adapters servers go on: a request keeps its adapter."""
        self._paused = True
        self._pause_servers()

    def resume(self) -> None:
        self._paused = False
        self._resume_servers()

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine`. A server that fails during the update is evicted, and
        `weight_version` is then -1: call again for the others. Raises RunError if none is left, or
        if names or shapes differ from --hf-checkpoint."""
        if self.pool is None or self.weight_version < 0:
            self._begin_update(version)
        done = False
        error: Exception | None = None
        if self._memory is not None:
            self._memory.resume()
        ranks = SendingRanks(weights, self._bucket_bytes)
        if self.pool is None:
            ranks.assist()
        else:
            try:
                assert self._updater is not None
                self._updater.stage(ranks, version)
                if self.weight_version >= 0:  # until here, servers have sampled on
                    self._begin_update(version)
                done = self._update(ranks, version)
            except (RunError, ValueError, OSError) as caught:
                error = caught if isinstance(caught, RunError) else RunError(str(caught))
            ranks.finish()
        try:
            done = share(done, error)
        except RunError:
            self._end_update()
            raise
        if done:  # otherwise there will be another attempt
            self.weight_version = version
            self._end_update()

    def _begin_update(self, version: int) -> None:
        if self._requests is not None:  # set first, so that new requests wait instead of failing
            self._requests.updating = True
            self._requests.bypasses_router = False
            self._requests.sent.append(version)
        self.weight_version = -1

    def _end_update(self) -> None:
        if self._requests is not None:
            self._requests.updating = False

    def _update(self, ranks: SendingRanks, version: int) -> bool:
        assert self.pool is not None and self._updater is not None
        with self.pool.lock:
            for worker in self.pool.workers:
                worker.version = None
        start = time.monotonic()
        self._pause_servers()
        first = not self._metrics
        if first and self._check_updates and not self.takes_adapter:
            noise = self.pool.api.noise
            if self._left_out:
                noise = replace(noise, body={**noise.body, "skip_tensor_list": self._left_out})
            self._call_all(noise)
        try:
            sent = self._updater.update(ranks, version)
        except UpdateIncomplete as incomplete:
            logger.warning(f"weights of version {version} did not reach every engine: {incomplete}")
            # servers stay paused until the next attempt: none may generate with partial weights
            return False
        if not self.takes_adapter:  # servers check the names and shapes of an adapter
            compare_with_checkpoint(sent.shapes, self._hf_checkpoint)
        evictions = {worker: worker.evictions for worker in sent.workers}
        workers = check_versions(self.pool, sent.workers, version)
        if first or self._check_updates:
            check_equal_weights(self.pool, workers)
        if not self._paused:  # otherwise the caller resumes
            self._resume_servers()
        self.pool.version = version
        refusals = dict[Worker, str]()
        for worker in workers:
            try:
                self.pool.has_weights(worker, version, evictions[worker])
            except RunError as refusal:
                if worker.evictions == evictions[worker]:  # it was not lost meanwhile
                    refusals[worker] = str(refusal)
        if refusals and refusals.keys() >= set(self.pool.ready()):
            raise RunError("; ".join(refusals.values()))  # it is the router that fails
        for worker, reason in refusals.items():
            self.pool.evict(worker, reason)
        self._metrics |= {
            "engine/weight_update_gb": sent.nbytes / 1e9,
            "engine/weight_update_gb_per_s": sent.nbytes / 1e9 / sent.seconds,
            "engine/weight_update_pause_s": time.monotonic() - start,
        }
        self._metrics["engine/weight_update_s"] = sent.seconds
        return True

    def _pause_servers(self) -> None:
        if self.pool is not None:
            self.pool.generates = False
            if not self.takes_adapter:
                self._call_all(self.pool.api.pause)

    def _resume_servers(self) -> None:
        if self.pool is not None:
            if not self.takes_adapter:
                self._call_all(self.pool.api.resume)
            self.pool.generates = True

    def _call_all(self, call: ServerCall) -> None:
        assert self.pool is not None
        call_servers(self.pool, self.pool.alive(), call)

    def probe(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[tuple[str, list[GenerateOutput]]]:
        """See `RolloutEngine`. A server lost during the probe is evicted with a warning; RunError
        if none responds and none restarts."""
        assert self.pool is not None
        results = self.ask(self.pool.ready(), requests, sampling)
        if not results and not self.pool.can_restart_any():
            raise RunError("no engine answers after a weight update; see the warnings above")
        return results

    def ask(
        self,
        workers: Sequence[Worker],
        requests: Sequence[GenerateRequest],
        sampling: SamplingParams,
    ) -> list[tuple[str, list[GenerateOutput]]]:
        """The outputs of those of these servers that answer. The others are evicted with a
        warning; RunError for a wrong answer."""
        assert self.pool is not None
        api = self.pool.api
        adapter = self.pool.adapter
        legal = Legal(self._vocab_size, {self.pool.version})

        async def probe_all() -> list[list[GenerateOutput | BaseException]]:
            async with async_client(len(requests)) as client:

                async def generate(worker: Worker, request: GenerateRequest) -> GenerateOutput:
                    rid = self._rank_zero_requests().new_id("probe")
                    body = api.generation_body(request, sampling, rid, self._settings.images)
                    if adapter is not None:
                        body = api.with_adapter(body, adapter.name)
                    url = worker.url + api.generate_path
                    limit = api.max_response_bytes(request, sampling)
                    answer = await post_once(client, url, body, self._settings.deadlines, limit)
                    return api.read_generation(answer, request, sampling, rid, legal)

                outputs = []
                for worker in workers:
                    calls = [generate(worker, request) for request in requests]
                    outputs.append(await asyncio.gather(*calls, return_exceptions=True))
                return outputs

        results = []
        for worker, outputs in zip(workers, asyncio.run(probe_all()), strict=True):
            failures = [output for output in outputs if isinstance(output, BaseException)]
            if not failures:
                succeeded = [output for output in outputs if isinstance(output, GenerateOutput)]
                results.append((worker.url, succeeded))
            elif isinstance(failures[0], RequestFailed):
                self.pool.evict(worker, f"no answer after a weight update: {failures[0]}")
            elif isinstance(failures[0], InvalidResponse | RefusedByServer):
                raise RunError(
                    f"the engine {worker.url} gives a wrong answer after a weight update: "
                    f"{failures[0]}"
                )
            else:
                raise failures[0]
        return results

    def release_memory(self) -> None:
        """Before training, servers release weights and KV cache on GPUs that they share with the
        trainer, until the next update."""
        if self._memory is not None:
            if self.pool is not None:
                self.pool.generates = False
            self._memory.release()
            self.weight_version = -1

    # --- health

    def check_health(self) -> None:
        """Collective. Sets `weight_version` to -1 if a healthy server lacks the current weights.
        Raises RunError if no server responds and none can recover in time."""
        if from_rank_zero(self._is_stale):
            self.weight_version = -1

    def _is_stale(self) -> bool:
        """On rank 0, wait for a healthy server; returns whether any lacks the current weights.
        Raises RunError if none responds in time."""
        if self.pool is None:
            return False
        deadline = time.monotonic() + self.pool.health.start_s
        while (
            not self.pool.alive() and self.pool.may_answer_again() and time.monotonic() < deadline
        ):
            time.sleep(POLL_S)
        alive = self.pool.alive()
        if not alive:
            raise RunError(
                f"no engine answers any more: {', '.join(w.url for w in self.pool.workers)}"
            )
        return any(worker.version != self.weight_version for worker in alive)

    def take_metrics(self) -> dict[str, float]:
        """On rank 0, request counts by outcome since the last call, and metrics of the latest
        weight update."""
        metrics = dict(self._metrics)
        if self.pool is None or self._requests is None:
            return metrics
        # requests that are under way go on counting in the same object
        counts = Counter(self._requests.counts)
        self._requests.counts.clear()
        metrics |= {f"engine/{name}": float(value) for name, value in counts.items()}
        for name in ("retries", "dropped", "rejected"):
            metrics.setdefault(f"engine/{name}", 0.0)
        metrics["engine/ready"] = float(len(self.pool.ready()))
        metrics["engine/evictions"] = float(self.pool.evictions)
        return metrics

    def close(self) -> None:
        leave_group()  # leave the process groups in which this rank sent weights
        if self._updater is not None:
            self._updater.close()
            self._updater = None
        if self.pool is not None:
            self.pool.close()
            self.pool = self._requests = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None
