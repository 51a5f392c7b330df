"""Generation requests from rank 0 to servers: load balancing, retries, aborts and validation
of responses."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import httpx

from slime_like.checked_json import InvalidResponse, WrongWeightVersion
from slime_like.engines.base import (
    ABORT_AGAIN_S,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
)
from slime_like.images.processor import ImageProcessor
from slime_like.servers.http import (
    CONTROL_S,
    Deadlines,
    RequestFailed,
    Retries,
    async_client,
    post_once,
    with_retries,
)
from slime_like.servers.indexer_topk import IndexerFormat
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.servers.server_api import Legal, RefusedByServer
from slime_like.servers.server_pool import ServedAdapter, ServerPool, Worker

ABORT_DEADLINES = Deadlines(CONTROL_S, CONTROL_S, CONTROL_S)
POLL_S = 0.1  # polling interval while no server is ready
# SGLang's and vLLM's words for an adapter that they lack, with status 400 or 404 and its name
LACKS_ADAPTER = ("never been loaded", "not loaded", "does not exist")


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Request settings."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    retries: Retries = field(default_factory=Retries)
    concurrency: int = 512  # requests in flight per server
    images: ImageProcessor | None = None  # the model's, if prompts may have images


class ServerRequests:
    """Sends the requests of one engine; a `GenerationClient`."""

    def __init__(
        self,
        pool: ServerPool,
        settings: RequestSettings,
        vocab_size: int,
        routed_experts: RoutesFormat | None,
        indexer_topk: IndexerFormat | None = None,
    ) -> None:
        """
        Args:
            pool: The servers.
            settings: Deadlines, retries and concurrency.
            vocab_size: Bound of token ids in responses.
            routed_experts: Format of routed experts; None for a dense model.
            indexer_topk: Format of selected keys; None for a model without indexers.
        """
        # weight versions that were sent, even if they did not reach every server
        self.sent: list[int] = []
        self.updating = False  # weights are being replaced, requests wait
        # a server behind the router has other weights, until the next update
        self.bypasses_router = False
        self.counts: Counter[str] = Counter()  # requests by outcome
        self._pool = pool
        self._settings = settings
        self._vocab_size = vocab_size
        self._routed_experts = routed_experts
        self._indexer_topk = indexer_topk
        self._numbers = itertools.count()
        self._run = f"{os.getpid():x}-{time.time_ns():x}"
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(1)
        self._pending: dict[str, int] = {}  # request id -> sample id
        self._abort_requested: set[str] = set()
        # where each request is that is under way; None: behind the router
        self._servers: dict[str, Worker | None] = {}
        self._aborting: asyncio.Task[None] | None = None

    def new_id(self, what: object) -> str:
        """A unique request id."""
        return f"{self._run}-{what}-{next(self._numbers)}"

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        """As `RolloutEngine.generate_one`."""
        if not request.prompt_tokens:
            raise ValueError(f"sample {request.sample_id}: the prompt is empty")
        if sampling.report_routed_experts and self._routed_experts is None:
            raise ValueError("report_routed_experts: the network has no experts")
        if sampling.report_indexer_topk and self._indexer_topk is None:
            raise ValueError("report_indexer_topk: the network has no indexers")
        client = self._loop_client()
        rid = self.new_id(request.sample_id)
        self._pending[rid] = request.sample_id
        try:
            async with self._slots:
                return await self._generate(client, request, sampling, rid)
        except (RequestFailed, InvalidResponse) as failure:
            self.counts["dropped" if isinstance(failure, RequestFailed) else "rejected"] += 1
            if isinstance(failure, InvalidResponse):
                self.counts[failure.kind] += 1
            message = str(failure) if rid in str(failure) else f"request {rid}: {failure}"
            return GenerateOutput(request.sample_id, (), (), "abort", (), failure=message)
        finally:
            self._pending.pop(rid, None)
            self._abort_requested.discard(rid)

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        """As `RolloutEngine.abort`."""
        rids = [
            rid
            for rid, sample_id in self._pending.items()
            if sample_ids is None or sample_id in sample_ids
        ]
        self._abort_requested.update(rids)
        await self._send_aborts(rids)
        if self._abort_requested and (self._aborting is None or self._aborting.done()):
            self._aborting = asyncio.create_task(self._abort_again())

    async def _abort_again(self) -> None:
        """Until no aborted request is left."""
        while self._abort_requested:
            await asyncio.sleep(ABORT_AGAIN_S)
            await self._send_aborts(self._abort_requested & self._servers.keys())

    async def _send_aborts(self, rids: Collection[str]) -> None:
        client = self._loop_client()

        async def send_abort(worker: Worker, rid: str) -> None:
            try:
                call = self._pool.api.abort(rid)
                await post_once(client, worker.url + call.path, call.body, ABORT_DEADLINES)
            except RequestFailed as failure:  # a dead server has aborted it already
                self.counts[f"abort_{failure.kind}"] += 1

        alive = self._pool.alive()
        found = [(rid, self._servers.get(rid)) for rid in rids]
        await asyncio.gather(
            *(
                send_abort(worker, rid)
                for rid, server in found
                for worker in (alive if server is None else [server])
            )
        )

    async def _generate(
        self,
        client: httpx.AsyncClient,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
    ) -> GenerateOutput:
        avoid: set[str] = set()
        unknown = sampling.report_routed_experts or sampling.report_indexer_topk
        unknown = unknown or sampling.report_sampling_mask
        unknown = unknown or self._pool.adapter is not None or bool(request.adapter)
        if unknown and self._pool.router is not None:
            # the router drops fields that it does not know, such as the request for routed experts,
            # and an adapter must not be lost
            avoid.add(self._pool.router.url)

        async def attempt(number: int) -> GenerateOutput:
            if rid in self._abort_requested:
                return GenerateOutput(request.sample_id, (), (), "abort", ())
            attempt_rid = rid if number == 1 else f"{rid}-{number}"
            self._pending[attempt_rid] = request.sample_id
            try:
                return await self._attempt(client, request, sampling, attempt_rid, avoid)
            except RefusedByServer as refusal:
                raise RequestFailed(
                    f"refused_{refusal.status}", str(refusal), retryable=refusal.status >= 500
                ) from None
            finally:
                if attempt_rid != rid:
                    del self._pending[attempt_rid]
                    self._abort_requested.discard(attempt_rid)

        output: GenerateOutput = await with_retries(attempt, self._settings.retries, self.counts)
        return output

    async def _attempt(
        self,
        client: httpx.AsyncClient,
        request: GenerateRequest,
        sampling: SamplingParams,
        rid: str,
        avoid: set[str],
    ) -> GenerateOutput:
        """One attempt. A server that responds with an impossible weight version, or lacks the
        adapter, is evicted until it has the current weights. Raises RequestFailed, InvalidResponse,
        RefusedByServer."""
        target = await self._target(avoid, rid)
        if target is None:
            return GenerateOutput(request.sample_id, (), (), "abort", ())
        url, worker = target
        oldest = self._pool.version
        evictions = 0 if worker is None else worker.evictions
        api = self._pool.api
        body = api.generation_body(request, sampling, rid, self._settings.images)
        limit = api.max_response_bytes(request, sampling, self._token_bytes(sampling))
        if request.adapter:
            body = api.with_adapter(body, request.adapter)
        with self._pool.current_adapter() as adapter:
            if adapter is not None:
                oldest = adapter.version
                body = api.with_adapter(body, adapter.name)
            self._servers[rid] = worker
            try:
                answer = await self._post(client, url, worker, body, limit, avoid)
            except RequestFailed as failure:
                if adapter is None or not _lacks(adapter, failure):
                    raise
                await self._report_lacking(adapter, worker, evictions, str(failure))
                raise RequestFailed("no_adapter", str(failure), retryable=True) from None
            finally:
                del self._servers[rid]
        versions = {v for v in self.sent if v >= oldest}
        legal = Legal(self._vocab_size, versions, self._routed_experts, self._indexer_topk)
        try:
            output = api.read_generation(answer, request, sampling, rid, legal)
            if adapter is None:
                return output
            # the request kept its adapter, whatever version the server came to report
            return replace(output, weight_versions=(oldest,) * len(output.tokens))
        except WrongWeightVersion as error:
            self.counts["wrong_version"] += 1
            if worker is None:
                self.bypasses_router = True
            else:
                # in a thread: it may call the router
                await asyncio.to_thread(
                    self._pool.report_wrong_version, worker, evictions, str(error)
                )
            raise WrongWeightVersion(f"{url}: {error}") from None
        except InvalidResponse as error:
            raise type(error)(f"{url}: {error}") from None
        except RefusedByServer:
            avoid.add(url)
            raise

    async def _report_lacking(
        self, adapter: ServedAdapter, worker: Worker | None, evictions: int, reason: str
    ) -> None:
        """A server has restarted since its last health probe, and lost the adapter. One that lacks
        an older adapter than the current one may have got that already."""
        if worker is not None and adapter == self._pool.adapter:
            await asyncio.to_thread(self._pool.report_wrong_version, worker, evictions, reason)

    def _token_bytes(self, sampling: SamplingParams) -> int:
        """Bytes of one token's choices in a response: base64 of int32 for every layer."""
        numbers = 0
        if sampling.report_routed_experts and self._routed_experts is not None:
            numbers += len(self._routed_experts.sparse) * self._routed_experts.topk
        if sampling.report_indexer_topk and self._indexer_topk is not None:
            numbers += len(self._indexer_topk.indexed) * self._indexer_topk.topk
        return 6 * numbers

    async def _post(
        self,
        client: httpx.AsyncClient,
        url: str,
        worker: Worker | None,
        body: dict[str, object],
        max_bytes: int,
        avoid: set[str],
    ) -> bytes:
        """POST through the router or to a server. avoid: addresses where this request failed;
        extended on failure."""
        deadlines = self._settings.deadlines
        # a task of its own: an eviction that comes just after the response must not cancel what the
        # request does next
        path = self._pool.api.generate_path
        task = asyncio.create_task(post_once(client, url + path, body, deadlines, max_bytes))
        if worker is not None:
            with self._pool.lock:
                worker.in_flight.add(task)
        try:
            return await task
        except RequestFailed as failure:
            avoid.add(url)
            if worker is not None and failure.server_gone:
                worker.failed_probes += 1
            raise
        except asyncio.CancelledError as cancelled:
            if "evicted" not in cancelled.args:
                raise
            raise RequestFailed(
                "evicted",
                f"{url}: the server was taken out while it worked on this",
                retryable=True,
            ) from None
        finally:
            if worker is not None:
                with self._pool.lock:
                    worker.in_flight.discard(task)

    async def _target(self, avoid: set[str], rid: str) -> tuple[str, Worker | None] | None:
        """Where to send a request: the router, or the server with the fewest requests in flight.
        Waits while a server may still recover; None if the request is aborted meanwhile. A request
        that failed at the router is sent to a server directly: the router may be down, or wrongly
        consider servers dead."""
        deadline = time.monotonic() + self._settings.deadlines.total_s
        while self.updating or not (ready := self._pool.ready()):
            if not (self.updating or self._pool.may_recover()) or time.monotonic() > deadline:
                raise RequestFailed(
                    "no_engine", "no engine with the current weights is left", retryable=False
                )
            await asyncio.sleep(POLL_S)
            if rid in self._abort_requested:
                return None
        router = self._pool.router
        if router is not None and router.url not in avoid and not self.bypasses_router:
            return router.url, None
        worker = min(ready, key=lambda w: (w.url in avoid, len(w.in_flight)))
        return worker.url, worker

    def _loop_client(self) -> httpx.AsyncClient:
        """The HTTP client of the current event loop; a client is bound to its loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limit = self._settings.concurrency * max(1, len(self._pool.workers))
            self._client = async_client(limit)
            self._loop = loop
            self._slots = asyncio.Semaphore(limit)
        return self._client

    async def leave_loop(self) -> None:
        """As `RolloutEngine.leave_loop`."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            if self._aborting is not None:
                self._aborting.cancel()
                self._aborting = None
            await self._client.aclose()
            self._client = None


def _lacks(adapter: ServedAdapter, failure: RequestFailed) -> bool:
    """Whether a server refused a request because it does not have its adapter."""
    words = str(failure)
    refused = failure.kind in ("status_400", "status_404") and adapter.name in words
    return refused and any(reason in words for reason in LACKS_ADAPTER)
