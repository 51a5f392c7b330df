"""SGLang servers as a rollout engine: rank 0 talks to them for all ranks; the others take part in
handing over weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from torch import Tensor

from slime_like.distributed.collectives import from_rank_zero, share
from slime_like.errors import RunError
from slime_like.rollout.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.rollout.engines.checked_json import BadAnswer, WrongVersion
from slime_like.rollout.engines.sglang.control_plane import (
    ColocatedMemory,
    call_servers,
    check_alike,
    check_versions,
)
from slime_like.rollout.engines.sglang.http import (
    Deadlines,
    RequestFailed,
    Retries,
    async_client,
    post_once,
    with_retries,
)
from slime_like.rollout.engines.sglang.protocol import (
    Legal,
    Refused,
    answer_bytes,
    generation_body,
    meta_of,
    read_generation,
)
from slime_like.rollout.engines.sglang.routed_experts import RoutesFormat, read_routes
from slime_like.rollout.engines.sglang.server_pool import Fleet, Worker
from slime_like.rollout.engines.sglang.weight_spec import compare_with_checkpoint, vocabulary_size
from slime_like.rollout.engines.sglang.weight_update import (
    CONTROL_S,
    UpdateIncomplete,
    WeightUpdater,
)

logger = logging.getLogger(__name__)

PAUSE = {"mode": "retract"}
ABORT_DEADLINES = Deadlines(CONTROL_S, CONTROL_S, CONTROL_S)
LOOK_S = 0.1  # between two looks for a server that may answer


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """concurrency: requests on their way together, per server."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    retries: Retries = field(default_factory=Retries)
    concurrency: int = 512


class SglangEngine:
    """`RolloutEngine` over HTTP. fleet, updater: on rank 0 only, where they are made before this; None
    elsewhere. routes: of the network that
    is served; None: it has no experts."""

    def __init__(
        self, fleet: Fleet | None, updater: WeightUpdater | None, requests: RequestSettings, hf_checkpoint: str, *,
        check_updates: bool, colocated: bool = False, routes: RoutesFormat | None = None,
    ) -> None:  # fmt: skip
        self.weight_version = -1
        self.serves_all_ranks = True
        self.fleet = fleet
        self._updater = updater
        self._requests = requests
        self._hf_checkpoint = hf_checkpoint
        self._check_updates = check_updates
        self._routes = routes
        self._memory = ColocatedMemory(fleet) if colocated else None
        self._vocab_size = vocabulary_size(hf_checkpoint)
        self._sent: list[int] = []  # versions of weights, whether or not they reached every server
        # until the next update: a server behind it has other weights
        self._passes_by_router = False
        self._numbers = itertools.count()
        self._run = f"{os.getpid():x}-{time.time_ns():x}"
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(1)
        self._pending: dict[str, int] = {}  # request id -> sample id
        self._abort_asked: set[str] = set()
        self._paused = False
        self._updating = False  # requests wait meanwhile
        self._counts: Counter[str] = Counter()
        self._metrics: dict[str, float] = {}

    # --- requests

    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GenerateOutput]:
        async def all_of_them() -> list[GenerateOutput]:
            try:
                return await asyncio.gather(
                    *(self.generate_one(request, sampling) for request in requests)
                )
            finally:
                await self.leave_loop()

        return asyncio.run(all_of_them())

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        assert self.fleet is not None, "rank 0 asks for all"
        if self.weight_version < 0 and not self._updating:
            raise RuntimeError(
                "the engines have no complete weights: the first or latest update_weights did not succeed"
            )
        if not request.prompt_tokens:
            raise ValueError(f"sample {request.sample_id}: the prompt is empty")
        if sampling.report_routes and self._routes is None:
            raise ValueError("report_routes: the network has no experts")
        client = self._client_here()
        rid = f"{self._run}-{request.sample_id}-{next(self._numbers)}"
        self._pending[rid] = request.sample_id
        try:
            async with self._slots:
                return await self._ask(client, request, sampling, rid)
        except (RequestFailed, BadAnswer) as failure:
            kind = failure.kind if isinstance(failure, RequestFailed) else "bad_answer"
            self._counts["dropped" if isinstance(failure, RequestFailed) else "rejected"] += 1
            if isinstance(failure, BadAnswer):
                self._counts[kind] += 1
            words = str(failure) if rid in str(failure) else f"request {rid}: {failure}"
            return GenerateOutput(request.sample_id, (), (), "abort", (), failure=words)
        finally:
            self._pending.pop(rid, None)
            self._abort_asked.discard(rid)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        if self.fleet is None:
            return
        rids = [
            rid
            for rid, sample_id in self._pending.items()
            if sample_ids is None or sample_id in sample_ids
        ]
        self._abort_asked.update(rids)
        client = self._client_here()

        async def tell(worker: Worker, rid: str) -> None:
            try:
                await post_once(
                    client, f"{worker.url}/abort_request", {"rid": rid}, ABORT_DEADLINES
                )
            except RequestFailed as failure:  # a server that is gone has aborted it
                if failure.kind != "no_json":  # SGLang answers with an empty body
                    self._counts[f"abort_{failure.kind}"] += 1

        await asyncio.gather(*(tell(worker, rid) for worker in self.fleet.alive() for rid in rids))

    async def _ask(
        self,
        client: httpx.AsyncClient,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
    ) -> GenerateOutput:
        assert self.fleet is not None
        avoid: set[str] = set()
        if sampling.report_routes and self.fleet.router is not None:
            # of a request it passes on the fields that it knows: asking for routes is none of them
            avoid.add(self.fleet.router.url)

        async def attempt(number: int) -> GenerateOutput:
            if rid in self._abort_asked:
                return GenerateOutput(request.sample_id, (), (), "abort", ())
            this_rid = rid if number == 1 else f"{rid}-{number}"
            self._pending[this_rid] = request.sample_id
            try:
                return await self._answer(client, request, sampling, this_rid, avoid)
            except Refused as refused:
                raise RequestFailed(
                    f"refused_{refused.status}", str(refused), again=refused.status >= 500
                ) from None
            finally:
                if this_rid != rid:
                    del self._pending[this_rid]
                    self._abort_asked.discard(this_rid)

        output: GenerateOutput = await with_retries(attempt, self._requests.retries, self._counts)
        return output

    async def _answer(
        self,
        client: httpx.AsyncClient,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        avoid: set[str],
    ) -> GenerateOutput:
        """One attempt. A server that answers under weights that it cannot have is out until it has
        got the current ones. Raises RequestFailed, BadAnswer, Refused."""
        assert self.fleet is not None
        url, worker = await self._target(avoid)
        oldest, evictions = self.fleet.version, 0 if worker is None else worker.evictions
        body = generation_body(request, sampling, rid)
        limit = answer_bytes(request, sampling, self._token_bytes(sampling))
        answer = await self._post(client, url, worker, body, limit, avoid)
        legal = Legal(self._vocab_size, {v for v in self._sent if v >= oldest})
        try:
            output = read_generation(answer, request, sampling, rid, legal)
            if not sampling.report_routes:
                return output
            assert self._routes is not None
            routes = read_routes(meta_of(answer, rid), request, output, self._routes, rid)
            return replace(output, routes=routes)
        except WrongVersion as wrong:
            self._counts["wrong_version"] += 1
            if worker is None:
                self._passes_by_router = True
            else:
                # in a thread: it may have to tell the router
                await asyncio.to_thread(self.fleet.distrust, worker, evictions, str(wrong))
            raise WrongVersion(f"{url}: {wrong}") from None
        except BadAnswer as wrong:
            raise BadAnswer(f"{url}: {wrong}") from None

    def _token_bytes(self, sampling: SamplingParams) -> int:
        """Of a token's routed experts in an answer: base64 of int32 in every layer."""
        if not sampling.report_routes or self._routes is None:
            return 0
        return 6 * len(self._routes.sparse) * self._routes.topk

    async def _post(
        self,
        client: httpx.AsyncClient,
        url: str,
        worker: Worker | None,
        body: dict[str, Any],
        max_bytes: int,
        avoid: set[str],
    ) -> Any:
        """Through the router, or to a server. avoid: addresses where this request failed; grows."""
        assert self.fleet is not None
        task = asyncio.current_task()
        assert task is not None
        if worker is not None:
            with self.fleet.lock:
                worker.in_flight.add(task)
        try:
            deadlines = self._requests.deadlines
            return await post_once(client, f"{url}/generate", body, deadlines, max_bytes)
        except RequestFailed as failure:
            avoid.add(url)
            if worker is not None and failure.server_gone:
                worker.strikes += 1
            raise
        except asyncio.CancelledError as cancelled:
            if "evicted" not in cancelled.args:
                raise
            task.uncancel()
            raise RequestFailed(
                "evicted", f"{url}: the server was taken out while it worked on this", again=True
            ) from None
        finally:
            if worker is not None:
                with self.fleet.lock:
                    worker.in_flight.discard(task)

    async def _target(self, avoid: set[str]) -> tuple[str, Worker | None]:
        """Where to ask; the router, or the server with the fewest requests of ours. Waits for one
        that may answer, as long as one may come back. A request that failed at the router goes to a
        server itself: the router may be gone, or take servers for dead that are not."""
        assert self.fleet is not None
        deadline = time.monotonic() + self._requests.deadlines.total_s
        while self._updating or not (ready := self.fleet.ready()):
            if not (self._updating or self.fleet.may_recover()) or time.monotonic() > deadline:
                raise RequestFailed(
                    "no_engine", "no engine with the current weights is left", again=False
                )
            await asyncio.sleep(LOOK_S)
        router = self.fleet.router
        if router is not None and router.url not in avoid and not self._passes_by_router:
            return router.url, None
        worker = min(ready, key=lambda w: (w.url in avoid, len(w.in_flight)))
        return worker.url, worker

    def _client_here(self) -> httpx.AsyncClient:
        """The connections of this event loop; those of one that has ended are of no use."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            assert self.fleet is not None
            limit = self._requests.concurrency * max(1, len(self.fleet.workers))
            self._client = async_client(limit)
            self._loop, self._slots = loop, asyncio.Semaphore(limit)
        return self._client

    async def leave_loop(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
            self._client = None

    # --- weights

    def pause(self) -> None:
        """Requests stay at the servers, retracted: what they computed with the old weights is
        computed again after `resume`."""
        self._paused = True
        self._call_all("/pause_generation", PAUSE)

    def resume(self) -> None:
        self._paused = False
        self._call_all("/continue_generation", {})

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine`. When a server fails in the middle, it is evicted and
        `weight_version` is -1 afterwards: call again for the others. Raises RunError when none is
        left, or when what was sent is not what --hf-checkpoint has."""
        self.weight_version, self._updating, self._passes_by_router = -1, True, False
        self._sent.append(version)
        done = False
        error: Exception | None = None
        if self._memory is not None:
            self._memory.resume()
        if self.fleet is not None:
            try:
                done = self._update(weights, version)
            except (RunError, ValueError, OSError) as caught:
                error = caught if isinstance(caught, RunError) else RunError(str(caught))
        for _ in weights:  # the stream is a collective: all ranks take it to its end
            pass
        try:
            done = share(done, error)
        except RunError:
            self._updating = False
            raise
        if done:  # else there will be another attempt
            self.weight_version, self._updating = version, False

    def _update(self, weights: Iterator[tuple[str, Tensor]], version: int) -> bool:
        assert self.fleet is not None and self._updater is not None
        with self.fleet.lock:
            for worker in self.fleet.workers:
                worker.version = None
        self._call_all("/pause_generation", PAUSE)
        first = not self._metrics
        if first and self._check_updates:
            self._call_all("/weights_checker", {"action": "reset_tensors"})
        try:
            sent = self._updater.update(weights, version)
        except UpdateIncomplete as incomplete:
            logger.warning(f"weights of version {version} did not reach every engine: {incomplete}")
            # the servers stay paused until the update that follows: nobody may go on with half of
            # the weights
            return False
        compare_with_checkpoint(sent.shapes, self._hf_checkpoint)
        workers = check_versions(self.fleet, sent.workers, version)
        if first or self._check_updates:
            check_alike(self.fleet, workers)
        if not self._paused:  # by the caller
            self._call_all("/continue_generation", {})
        self.fleet.version = version
        for worker in workers:
            self.fleet.has_weights(worker, version)
        self._metrics |= {
            "engine/weight_update_gb": sent.nbytes / 1e9,
            "engine/weight_update_gb_per_s": sent.nbytes / 1e9 / sent.seconds,
        }
        self._metrics["engine/weight_update_s"] = sent.seconds
        return True

    def _call_all(self, path: str, body: dict[str, Any]) -> None:
        if self.fleet is not None:
            call_servers(self.fleet, self.fleet.alive(), path, body)

    def probe(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[tuple[str, list[GenerateOutput]]]:
        """On rank 0: what every server answers, by its address; one that is lost meanwhile is out,
        and told of. Raises RunError when none of them answers and none is started again, or when an
        answer is wrong."""
        assert self.fleet is not None
        workers = self.fleet.ready()
        legal = Legal(self._vocab_size, {self.fleet.version})

        async def ask() -> list[list[GenerateOutput | BaseException]]:
            async with async_client(len(requests)) as client:

                async def one(worker: Worker, request: GenerateRequest) -> GenerateOutput:
                    rid = f"{self._run}-probe-{next(self._numbers)}"
                    body = generation_body(request, sampling, rid)
                    url, limit = f"{worker.url}/generate", answer_bytes(request, sampling)
                    answer = await post_once(client, url, body, self._requests.deadlines, limit)
                    return read_generation(answer, request, sampling, rid, legal)

                return [
                    await asyncio.gather(
                        *(one(worker, r) for r in requests), return_exceptions=True
                    )
                    for worker in workers
                ]

        found = []
        for worker, outputs in zip(workers, asyncio.run(ask()), strict=True):
            failures = [output for output in outputs if isinstance(output, BaseException)]
            if not failures:
                found.append(
                    (
                        worker.url,
                        [output for output in outputs if isinstance(output, GenerateOutput)],
                    )
                )
            elif isinstance(failures[0], RequestFailed):
                self.fleet.evict(worker, f"no answer after a weight update: {failures[0]}")
            elif isinstance(failures[0], BadAnswer | Refused):
                raise RunError(
                    f"the engine {worker.url} gives a wrong answer after a weight update: {failures[0]}"
                )
            else:
                raise failures[0]
        if not found and not self.fleet.starts_again():
            raise RunError(
                "no engine answers after a weight update; what was wrong with each was told above"
            )
        return found

    def release_memory(self) -> None:
        """Before training: the servers give up weights and KV cache on the GPUs that they share
        with the trainer, until the next update."""
        if self._memory is not None:
            self._memory.release()
            self.weight_version = -1

    # --- health

    def check_health(self) -> None:
        """A collective. After it `weight_version` is -1 where a server that answers lacks the
        current weights. Raises RunError when none answers and none may come back in time."""
        if from_rank_zero(self._is_stale):
            self.weight_version = -1

    def _is_stale(self) -> bool:
        """On rank 0: whether a server that answers lacks the current weights, once one answers.
        Raises RunError when none does in time."""
        if self.fleet is None:
            return False
        deadline = time.monotonic() + self.fleet.health.start_s
        while (
            not self.fleet.alive()
            and any(w.process is not None or w.returning for w in self.fleet.workers)
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_S)
        alive = self.fleet.alive()
        if not alive:
            raise RunError(
                f"no engine answers any more: {', '.join(w.url for w in self.fleet.workers)}"
            )
        return any(worker.version != self.weight_version for worker in alive)

    def take_metrics(self) -> dict[str, float]:
        """Numbers since the last call, on rank 0: of requests by what became of them, and of the
        latest weight update."""
        counts = {f"engine/{name}": float(value) for name, value in self._counts.items()}
        counts |= {
            f"engine/{name}": 0.0
            for name in ("retries", "dropped", "rejected")
            if self.fleet is not None and name not in self._counts
        }
        if self.fleet is not None:
            counts["engine/ready"] = float(len(self.fleet.ready()))
            counts["engine/evictions"] = float(self.fleet.evictions)
        metrics, self._counts = {**self._metrics, **counts}, Counter()
        return metrics

    def close(self) -> None:
        if self._updater is not None:
            self._updater.close()
            self._updater = None
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None
