"""Accepts requests, executes them one at a time on the workers, and keeps their results. A single
asyncio task executes them, without polling.

Requests of a model are executed in sequence order; models and samplers take turns (round-robin).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from slime_like.tinker import codec
from slime_like.tinker.errors import Failed, HttpError, Refused
from slime_like.tinker.futures import Queue, Request
from slime_like.tinker.store import Journal, JournalError
from slime_like.tinker.supervision import supervised

log = logging.getLogger(__name__)
# seconds that a result is kept after it was fetched, because the response may be lost
KEEP_FETCHED_S = 120.0
KEEP_UNFETCHED_S = 3600.0
# seconds until a missing request of a client that sends in order is given up: it is not on its way
GIVEN_UP_S = 2.0
MAX_FINISHED = 2000  # finished requests per queue for which retries are recognised
MAX_WAITING_BYTES = 2**30
SWEEP_S = 1.0
JOURNAL_RETRY_S = 0.5

Result = tuple[bytes, str]  # with its content type


class Operations(Protocol):
    """Executes requests."""

    async def execute(self, requests: Sequence[Request]) -> Sequence[Result | Exception]: ...

    def can_batch(self, batch: Sequence[Request], other: Request) -> bool:
        """Whether a request of the same or another sampler can be executed together with these."""

    def needs_workers(self, request: Request) -> bool:
        """False for a request that fails in any case."""

    def executed(self, request: Request) -> None: ...

    def failed(self, request: Request, reason: str) -> None:
        """A request fails, executed or not; called while it still has its body."""

    def skipped(self, queue: str, numbers: range) -> None:
        """Requests of a model never came, and those behind them are executed or fail."""


class Dispatcher:
    def __init__(
        self,
        journal: Journal,
        operations: Operations,
        *,
        max_waiting: int,
        gap_s: float,
        batch: int,
        has_workers: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            max_waiting: Maximum number of waiting requests over all queues.
            gap_s: Maximum time in seconds that requests wait for a missing sequence number.
            batch: Samples executed together.
            has_workers: Whether workers are connected; call `wake` when this changes.
        """
        self.journal = journal
        self.operations = operations
        self.queues: dict[str, Queue] = {}
        self.requests: dict[str, Request] = {}
        self._max_waiting = max_waiting
        self._gap_s = gap_s
        self._batch = batch
        self._has_workers = has_workers
        self.on_done: Callable[[Request], None] = lambda request: None  # for metrics
        self._wake = asyncio.Event()
        self._last = ""
        self._executing = ""  # the queue whose requests are being executed
        self._bytes: dict[str, int] = {}  # of waiting and running bodies, by queue
        self._tasks: list[asyncio.Task[object]] = []

    def start(self, on_fault: Callable[[str], None] = log.error) -> None:
        """Start the background tasks. on_fault: called with a message if one of them ends
        unexpectedly."""
        self._tasks = [
            supervised("execution of requests", self._run(), on_fault),
            supervised("expiry of results", self._sweep(), on_fault),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def queue(self, key: str, *, next_seq: int | None, in_order: bool = False) -> Queue:
        return self.queues.setdefault(key, Queue(key, next_seq=next_seq, in_order=in_order))

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    # --- accepting ---

    def accepted(self, key: str, seq: int, digest: str) -> Request | None:
        """The previously accepted request with this sequence number, or None. Raises HttpError 422
        if that was a different request, or one that is not kept any more."""
        earlier = self.requests.get(request_id(key, seq))
        if earlier is not None:
            if earlier.digest != digest:
                raise HttpError(422, f"{key}: seq_id {seq} was used by another request")
            return earlier
        queue = self.queues.get(key)
        if queue is not None and queue.next_seq is not None and queue.has_taken(seq):
            raise HttpError(422, f"{key}: seq_id {seq} is too low; the next is {queue.next_seq}")
        return None

    def accept(self, request: Request, *, internal: bool = False) -> Request:
        """Put a new request into its queue. A queue may use at most as much space as it leaves
        free, so that a flooded queue leaves space for the others.

        Args:
            internal: A request of the server itself, which is always accepted.

        Raises:
            HttpError: 429 if too much is waiting, 503 if the journal cannot be written; clients
                retry after both.
        """
        body = codec.encode(request.body)
        request.size = len(body)
        if not internal:
            self._check_room(request)
        try:
            self.journal.put(
                "request", request.id, request.record(), body=body, required=not internal
            )
        except JournalError as error:
            raise HttpError(503, f"{error}; try again later") from error
        self.requests[request.id] = request
        self._add(request)
        self.wake()
        return request

    def _check_room(self, request: Request) -> None:
        waiting = len(self.queues[request.queue])
        size = self._bytes.get(request.queue, 0)
        free = self._max_waiting - self.waiting
        free_bytes = MAX_WAITING_BYTES - sum(self._bytes.values())
        if waiting >= free or size + request.size > free_bytes:
            raise HttpError(
                429,
                f"{waiting} requests of {request.queue} are waiting, {self.waiting} in total "
                "(--max-queued-requests); try again later",
            )

    def _add(self, request: Request) -> None:
        self.queues[request.queue].add(request)
        self._bytes[request.queue] = self._bytes.get(request.queue, 0) + request.size

    def restore(self, interrupted: Callable[[Request], str | None]) -> None:
        """Load the journal's requests into their queues, which must exist.

        Args:
            interrupted: Returns why an unfinished request cannot be executed any more, or None.
        """
        for id, record, body, result in list(self.journal.entries("request")):
            request = Request.from_journal(record, body, result)
            self.requests[id] = request
            if request.state == "done":
                continue
            reason = interrupted(request)
            if request.queue not in self.queues and reason is None:
                reason = f"{request.queue} has ended"
            if reason is not None:
                message = f"the server restarted before this request was executed: {reason}"
                self._fail(request, Failed(message))
            else:
                self._add(request)
        self._wake.set()

    # --- executing ---

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                await self._journal_written()
                batch = self._next_batch()
                if not batch:
                    break
                await self._execute(batch)

    def wake(self) -> None:
        """Check again for requests that can be executed."""
        self._wake.set()

    async def _journal_written(self) -> None:
        """Wait until the last results are in the journal; otherwise a restart would execute their
        requests again."""
        while self.journal.problem is not None and not self.journal.flush():
            await asyncio.sleep(JOURNAL_RETRY_S)

    def _can_execute(self, queue: Queue) -> bool:
        """Whether the queue's next request can be executed. Without workers, only requests that
        fail anyway are executed, so that their clients need not wait."""
        if not queue.ready:
            return False
        return self._has_workers() or not self.operations.needs_workers(queue.first())

    def _next_batch(self) -> list[Request]:
        """Requests to execute next, round-robin over queues: one of a model, or several of
        samplers."""
        keys = sorted(self.queues)
        start = next((i for i, key in enumerate(keys) if key > self._last), 0)
        in_turn = keys[start:] + keys[:start]
        for place, key in enumerate(in_turn):
            queue = self.queues[key]
            if not self._can_execute(queue):
                continue
            self._last = key
            if queue.next_seq is not None:
                return [queue.take()]
            return self._samples([self.queues[each] for each in in_turn[place:] + in_turn[:place]])
        return []

    def _samples(self, queues: Sequence[Queue]) -> list[Request]:
        """The first queue's next request, and others of samplers that can be executed together with
        it: one of each queue in turn, so that no sampler fills the batch while others wait."""
        batch = [queues[0].first()]
        turns = deque(queue.in_arrival_order() for queue in queues if queue.next_seq is None)
        next(turns[0])  # it is in the batch
        turns.rotate(-1)
        while turns and len(batch) < self._batch:
            waiting = turns.popleft()
            found = next((r for r in waiting if self.operations.can_batch(batch, r)), None)
            if found is not None:
                batch.append(found)
                turns.append(waiting)
        for request in batch:
            self.queues[request.queue].remove(request)
        return batch

    async def _execute(self, batch: list[Request]) -> None:
        for request in batch:
            request.state = "running"
            request.started = time.time()
        self._executing = batch[0].queue
        try:
            results = await self.operations.execute(batch)
        except Exception as error:
            if not isinstance(error, Refused | Failed):
                log.exception("executing %s", [request.id for request in batch])
            results = [error] * len(batch)
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self._fail(request, result)
            else:
                request.finish(*result)
                self._done(request)
        self._executing = ""

    def _fail(self, request: Request, error: Exception) -> None:
        """Finish a request with an error. The response has status 200, because clients retry
        others."""
        message = str(error)
        if not isinstance(error, Refused | Failed):
            message = f"internal error, please report it: {type(error).__name__}: {error}"
        category = "user" if isinstance(error, Refused) else "server"
        self.operations.failed(request, message)
        request.finish(json.dumps({"error": message}).encode(), "", category)
        self._done(request)

    def _done(self, request: Request) -> None:
        remaining = self._bytes.pop(request.queue, 0) - request.size
        if remaining > 0:
            self._bytes[request.queue] = remaining
        self.journal.put("request", request.id, request.record(), result=request.result)
        try:
            self.operations.executed(request)
            self._report(request)
        except Exception:  # the other requests continue
            log.exception("after executing %s", request.id)

    def _report(self, request: Request) -> None:
        """Log a finished request and report it to the metrics."""
        started = request.started or request.finished
        log.info(
            "request %s (%s) of %s: %s, waited %.3f s, took %.3f s",
            request.id,
            request.op,
            request.owner or "the server",
            f"failed ({request.category})" if request.failed else "done",
            started - request.created,
            request.finished - started,
        )
        self.on_done(request)

    def fail_all(self, key: str, error: Exception, *, forget: bool = False) -> None:
        """Fail all waiting requests of a queue. forget: remove the queue as well."""
        queue = self.queues.get(key)
        for request in queue.take_all() if queue is not None else []:
            self._fail(request, error)
        if forget:
            self.queues.pop(key, None)

    def cancel(self, id: str, owner: str) -> None:
        """Fail a waiting request of a sampler, which nobody waits for any more; no-op for one that
        is being executed or done. Raises HttpError as `find`."""
        request = self.find(id, owner)
        queue = self.queues.get(request.queue)
        if queue is None or queue.next_seq is not None or request.state != "waiting":
            return
        queue.remove(request)
        self._fail(request, Refused("cancelled by its client"))

    # --- periodic ---

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.time()
            if self.journal.problem is not None:
                self.journal.flush()
            for key, queue in list(self.queues.items()):
                since = queue.missing_since()
                if since is not None and key != self._executing:
                    self._close_gap(key, queue, now - since)
            self.expire(now)

    def _close_gap(self, key: str, queue: Queue, waited_s: float) -> None:
        """End the wait for a missing request once it will not come. Its client knows that it failed
        if the client sends in order: then those behind it are executed, as after every request that
        failed. Otherwise they fail, because their client may count on it. What it was is unknown,
        so it may have been a forward_backward."""
        if waited_s <= (min(GIVEN_UP_S, self._gap_s) if queue.in_order else self._gap_s):
            return
        numbers = queue.skip_missing()
        self.operations.skipped(key, numbers)
        if queue.in_order:
            log.info("%s: the client gave up its %s", key, named(numbers))
            self.wake()
        else:
            missing = f"request {numbers.start} of {key}"
            self.fail_all(key, Refused(f"{missing}, which precedes this one, never came"))

    def expire(self, now: float) -> None:
        """Forget results that were fetched or are too old, and the oldest results of long
        queues."""
        done: dict[str, list[Request]] = {}
        for request in list(self.requests.values()):
            if request.state != "done":
                continue
            fetched = request.fetched and now - request.fetched > KEEP_FETCHED_S
            if fetched or now - request.finished > KEEP_UNFETCHED_S:
                self._forget(request)
            else:
                done.setdefault(request.queue, []).append(request)
        for requests in done.values():
            for request in sorted(requests, key=lambda r: r.finished)[:-MAX_FINISHED]:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        self.requests.pop(request.id, None)
        self.journal.remove("request", request.id)

    # --- results ---

    def find(self, id: str, owner: str) -> Request:
        """Look up a request. Raises HttpError 404 if it never existed, 410 if its result is
        gone."""
        request = self.requests.get(id)
        if request is not None:
            if request.owner != owner:
                raise HttpError(404, f"request {id} does not exist")
            return request
        key, _, seq = id.rpartition("/")
        queue = self.queues.get(key)
        if queue is not None and seq.isdigit() and queue.has_taken(int(seq)):
            raise HttpError(410, f"the result of request {id} has expired")
        raise HttpError(404, f"request {id} does not exist")

    async def result(self, request: Request, *, hold_s: float) -> dict[str, object] | Result:
        """Response of `retrieve_future`: the result and its type, or JSON for a failure or, after
        `hold_s` seconds, for "try again"."""
        try:
            async with asyncio.timeout(hold_s):
                await request.done.wait()
        except TimeoutError:
            state = "active" if self.journal.problem is None else "paused_capacity"
            again: dict[str, object] = {
                "type": "try_again",
                "request_id": request.id,
                "queue_state": state,
            }
            if self.journal.problem is not None:
                again["queue_state_reason"] = self.journal.problem
            return again
        request.fetched = time.time()
        if request.failed:
            return {"error": json.loads(request.result)["error"], "category": request.category}
        return request.result, request.content_type


def named(numbers: range) -> str:
    """Requests by their first and last sequence number: a client may leave out any number."""
    if numbers.stop == numbers.start + 1:
        return f"request {numbers.start}"
    return f"requests {numbers.start} to {numbers.stop - 1}"


def request_id(key: str, seq: int) -> str:
    return f"{key}/{seq}"
