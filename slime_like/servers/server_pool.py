"""The pool of servers: which exist, which may get requests, eviction and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from slime_like.checked_json import InvalidResponse, read
from slime_like.errors import RunError
from slime_like.servers.control_answers import ModelInfo
from slime_like.servers.http import ANSWER_BYTES, CONTROL_S, ControlClient, RequestFailed
from slime_like.servers.processes import EngineProcess
from slime_like.servers.router import Router
from slime_like.servers.server_api import ServerApi, ServerCall, ServerSizes

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RESTARTS = 3  # restarts of one server per run
MAX_WRONG_VERSIONS = 3  # evictions for wrong weight versions before a server stays out
PROCESS_POLL_S = 0.5
START_TICK_S = 10.0  # between two lines while servers start


@dataclass(slots=True, eq=False)
class Worker:
    """One server."""

    url: str
    process: EngineProcess | None = None
    alive: bool = False
    # weight version that it is known to have; None: unknown, it gets no requests
    version: int | None = None
    failed_probes: int = 0  # consecutive ones
    restarts: int = 0
    # time.monotonic() by which a restarted server must answer; None: it has answered
    answer_by: float | None = None
    evictions: int = 0
    num_wrong_versions: int = 0  # evictions for an impossible weight version
    # evicted for that reason, or could not be given the weights; it gets them at the next probe
    returning: bool = False
    # tasks of requests sent to it directly
    in_flight: set[asyncio.Task[bytes]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """A LoRA adapter on the servers, beside the base model."""

    name: str  # by which requests ask for it
    version: int


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Health checks."""

    interval_s: float = 10.0  # between probes of a server
    timeout_s: float = 10.0  # of one probe
    start_s: float = 600.0  # for a server to start
    failed_probes: int = 3  # consecutive ones before eviction


class ServerPool:
    """All servers: external ones by address, and those that this run started and will end.

    joined_by_router: also servers that are added to the router later. Worker state changes under
    `lock`, because three threads use it: training thread, event loop and health monitor.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        started: Sequence[tuple[str, EngineProcess]],
        router: Router | None,
        health: HealthSettings,
        connect_s: float,
        *,
        api: ServerApi,
        joined_by_router: bool = False,
    ) -> None:
        self.api = api
        self.router = router
        self.joined_by_router = joined_by_router
        self.health = health
        self.lock = threading.RLock()
        self.version = -1  # weight version that requests are served with
        # the adapter of new requests; None: they are served with the servers' own weights
        self.adapter: ServedAdapter | None = None
        # False while servers are paused or have released their memory
        self.generates = True
        self.adapters_in_use: Counter[ServedAdapter] = Counter()  # requests of each, none at zero
        # Sends one server the latest weights and returns their version, None if there are none yet;
        # raises RunError. None: only the next update of all servers can
        self.restore: Callable[[Worker], int | None] | None = None
        self.connect_s = connect_s
        self._control = ControlClient(connect_s)
        self._stop = threading.Event()
        self._wake = threading.Event()  # set to probe immediately
        self._router_warning = ""
        self._monitor: threading.Thread | None = None
        self.workers = [Worker(url) for url in addresses] + [
            Worker(url, process) for url, process in started
        ]

    def start(self) -> None:
        """Wait until every server responds, then start health checks. Raises RunError naming those
        that do not."""
        began = told = time.monotonic()
        deadline = began + self.health.start_s
        waiting = list(self.workers)
        while waiting:
            for worker in waiting:
                status = None if worker.process is None else worker.process.exit_status
                if status is not None:
                    raise RunError(
                        f"the engine {worker.url} ended with status {status} while it started:\n"
                        f"{log_tail(worker)}"
                    )
            waiting = [worker for worker in waiting if not self.is_healthy(worker)]
            if waiting and time.monotonic() > deadline:
                names = ", ".join(worker.url for worker in waiting)
                raise RunError(
                    f"no answer from the engines {names} within {self.health.start_s:g} s "
                    "(--rollout-health-check-first-wait)\n" + "\n".join(map(log_tail, waiting))
                )
            if waiting and time.monotonic() - told >= START_TICK_S:
                told = time.monotonic()
                self._say_who_is_starting(waiting, told - began)
            if waiting:
                time.sleep(0.25)
        for worker in self.workers:
            worker.alive = True
        self.handle_added_servers()
        self._monitor = threading.Thread(
            target=self._monitor_health, name="server-health", daemon=True
        )
        self._monitor.start()

    def _say_who_is_starting(self, waiting: Sequence[Worker], elapsed_s: float) -> None:
        """One line, so that a start of minutes does not look like a hang."""
        logger.info(
            "%d of %d engines answer after %.0f s (at most %g s); waiting for %s",
            len(self.workers) - len(waiting),
            len(self.workers),
            elapsed_s,
            self.health.start_s,
            ", ".join(worker.url for worker in waiting),
        )

    @contextlib.contextmanager
    def current_adapter(self) -> Iterator[ServedAdapter | None]:
        """The adapter of a request, which no server unloads within the block."""
        with self.lock:
            adapter = self.adapter
            if adapter is not None:
                self.adapters_in_use[adapter] += 1
        try:
            yield adapter
        finally:
            if adapter is not None:
                with self.lock:
                    self.adapters_in_use[adapter] -= 1
                    if not self.adapters_in_use[adapter]:
                        del self.adapters_in_use[adapter]

    def alive(self) -> list[Worker]:
        with self.lock:
            return [worker for worker in self.workers if worker.alive]

    def ready(self) -> list[Worker]:
        """Servers that may get requests now."""
        with self.lock:
            return [
                worker for worker in self.workers if worker.alive and worker.version == self.version
            ]

    @property
    def evictions(self) -> int:
        return sum(worker.evictions for worker in self.workers)

    def may_recover(self) -> bool:
        """Whether a server without the current weights can get them before the next update."""
        return self.restore is not None and self.may_answer_again()

    def may_answer_again(self) -> bool:
        """Whether a server that is out may return by itself."""
        with self.lock:
            returning = any(worker.returning for worker in self.workers)
        return returning or self.can_restart_any()

    def can_restart_any(self) -> bool:
        """Whether an evicted server may be restarted, or is starting."""
        with self.lock:
            return any(
                w.process is not None
                and (w.restarts < MAX_RESTARTS or w.process.exit_status is None)
                and w.num_wrong_versions < MAX_WRONG_VERSIONS
                for w in self.workers
            )

    def call(
        self,
        worker: Worker,
        path: str,
        body: object = None,
        *,
        timeout_s: float,
        method: str = "POST",
        max_bytes: int = ANSWER_BYTES,
        reads_object: bool = True,
    ) -> dict[str, object]:
        """A control call; see `ControlClient.call`. Raises RequestFailed."""
        return self._control.call(
            worker.url + path,
            body if body is not None else {},
            timeout_s=timeout_s,
            method=method,
            max_bytes=max_bytes,
            reads_object=reads_object,
        )

    def post(self, worker: Worker, call: ServerCall, *, timeout_s: float) -> dict[str, object]:
        """Make a control call; as `call`."""
        return self.call(
            worker,
            call.path,
            call.body,
            timeout_s=timeout_s,
            reads_object=not call.answers_text,
        )

    def weight_version(self, worker: Worker) -> str:
        """The version that a server reports, as it was sent. Raises RequestFailed, also for an
        invalid response, as do the next two."""
        path = self.api.version_path
        return self._read(worker, path, lambda answer: read(ModelInfo, answer)).weight_version

    def sizes(self, worker: Worker) -> ServerSizes:
        return self._read(worker, self.api.info_path, self.api.read_sizes)

    def checksums(self, worker: Worker) -> dict[str, str]:
        """The checksum of every weight, by rank and name."""
        call = self.api.checksum
        answer = self.post(worker, call, timeout_s=10 * CONTROL_S)
        return _valid(answer, worker.url + call.path, self.api.read_checksums)

    def _read(self, worker: Worker, path: str, reader: Callable[[Mapping[str, object]], T]) -> T:
        answer = self.call(worker, path, timeout_s=CONTROL_S, method="GET")
        return _valid(answer, worker.url + path, reader)

    def is_healthy(
        self, worker: Worker, timeout_s: float | None = None, path: str = "/health"
    ) -> bool:
        """Whether the server passes a health probe. path: by default one that succeeds once the
        server has started."""
        return self._control.is_reachable(
            worker.url + path, self.health.timeout_s if timeout_s is None else timeout_s
        )

    def _passes_probe(self, worker: Worker) -> bool:
        """As `is_healthy`. A server has to generate, also before it returns, but not while it is
        updated: a long update would look like a hang."""
        lacks_weights = worker.version is None and not worker.returning
        bare = worker.alive and (lacks_weights or not self.generates)
        path = self.api.bare_probe if bare else self.api.generation_probe
        return self.is_healthy(worker, path=path)

    def has_weights(self, worker: Worker, version: int, evictions: int) -> None:
        """Mark the server as holding `version`, so that it gets requests. evictions: its count when
        the weights were sent; a server that was evicted since then is left as it is. Raises
        RunError if the router does not take it."""
        with self.lock:
            if not worker.alive or worker.evictions != evictions:
                return
            worker.version = version
            worker.returning = False
        if self.router is not None:
            self.router.add(worker.url)

    def evict(self, worker: Worker, reason: str) -> None:
        """Evict a server: its requests are retried elsewhere. A server that we started is
        restarted."""
        with self.lock:
            evicted = self._mark_evicted(worker)
        if evicted:
            self._after_eviction(worker, reason)

    def _mark_evicted(self, worker: Worker) -> bool:
        """Under the lock; whether it was not out before."""
        if not worker.alive and worker.version is None:
            return False
        worker.alive = False
        worker.version = None
        worker.returning = False
        worker.failed_probes = 0
        worker.evictions += 1
        for task in worker.in_flight:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                task.get_loop().call_soon_threadsafe(task.cancel, "evicted")
        return True

    def _after_eviction(self, worker: Worker, reason: str) -> None:
        """Without the lock, because the router may take a minute."""
        logger.warning(f"the engine {worker.url} is out: {reason}")
        if self.router is not None:
            self.router.remove(worker.url)

    def report_wrong_version(self, worker: Worker, evictions: int, reason: str) -> None:
        """Evict a server that responded with an impossible weight version, or lacks the adapter.
        The first few times it gets the current weights and returns. evictions: its count when the
        request was sent; if it has grown since, the response predates that eviction and is
        ignored."""
        with self.lock:
            if worker.evictions != evictions or not self._mark_evicted(worker):
                return
            worker.num_wrong_versions += 1
            times = worker.num_wrong_versions
            worker.returning = times < MAX_WRONG_VERSIONS
        suffix = "" if times < MAX_WRONG_VERSIONS else f"; after {times} times it stays out"
        self._after_eviction(worker, reason + suffix)
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._monitor is not None:
            self._monitor.join(self.health.timeout_s + 5)
        if self.router is not None:
            self.router.close()
        processes = [w.process for w in self.workers if w.process is not None]
        if processes:
            with ThreadPoolExecutor(len(processes)) as threads:
                list(threads.map(lambda process: process.end(), processes))
        self._control.close()

    def _monitor_health(self) -> None:
        """Health-check thread: probe every server periodically, and check in between that started
        processes still run."""
        next_probe = 0.0
        while not self._stop.is_set():
            woken = self._wake.wait(min(PROCESS_POLL_S, self.health.interval_s))
            self._wake.clear()
            probes = woken or time.monotonic() >= next_probe
            if probes:
                next_probe = time.monotonic() + self.health.interval_s
                self._log_errors("the servers of the router", self.handle_added_servers)
            for worker in list(self.workers):
                if self._stop.is_set():
                    return
                check = functools.partial(self._check_worker, worker, probe=probes)
                self._log_errors(f"the engine {worker.url}", check)

    def _log_errors(self, what: str, action: Callable[[], None]) -> None:
        """Run `action`; an error about one server must not end the health checks."""
        try:
            action()
        except Exception as error:
            logger.warning(f"watching {what}: {type(error).__name__}: {error}")

    def handle_added_servers(self) -> None:
        """Handle servers that were added to the user's router: they get no requests through it
        until they have the current weights, or never if they do not belong to this run."""
        if self.router is None or self.router.is_ours:
            return
        try:
            members = {worker.url for worker in self.workers}
            new_urls = [url for url in self.router.workers() if url not in members]
        except RequestFailed as failure:  # an unreachable router adds no servers
            if failure.kind == "bad_answer" and self._router_warning != str(failure):
                self._router_warning = str(failure)
                logger.warning(f"the router does not list its engines: {failure}")
            return
        for url in new_urls:
            self.router.remove(url)
            if self.joined_by_router:
                with self.lock:
                    self.workers.append(Worker(url))
                logger.info(f"the engine {url} joins this run through the router {self.router.url}")
            else:
                logger.warning(
                    f"the engine {url} does not belong to this run and was removed from the router "
                    f"{self.router.url}"
                )

    def _check_worker(self, worker: Worker, *, probe: bool) -> None:
        status = None if worker.process is None else worker.process.exit_status
        if status is not None:
            self.evict(worker, f"its process ended with status {status}")
            self._restart(worker)
            return
        if not probe:
            return
        if self._passes_probe(worker):
            worker.failed_probes = 0
            worker.answer_by = None
            out = not worker.alive or worker.returning
            if out and worker.num_wrong_versions < MAX_WRONG_VERSIONS:
                self._readmit(worker)
            return
        worker.failed_probes += 1
        hangs = worker.failed_probes >= self.health.failed_probes
        if worker.alive and hangs:
            self.evict(
                worker,
                f"{self.health.failed_probes} consecutive health probes failed "
                f"(timeout {self.health.timeout_s:g} s)",
            )
        if worker.answer_by is not None:  # it is still starting
            hangs = time.monotonic() > worker.answer_by
        if worker.process is not None and hangs:  # also if it was evicted for another reason
            worker.process.end()
            self._restart(worker)

    def _restart(self, worker: Worker) -> None:
        assert worker.process is not None
        if worker.restarts >= MAX_RESTARTS or self._stop.is_set():
            return
        worker.restarts += 1
        worker.failed_probes = 0
        worker.answer_by = time.monotonic() + self.health.start_s
        logger.warning(f"engine {worker.url} is restarted ({worker.restarts} of {MAX_RESTARTS})")
        worker.process = worker.process.restart()

    def _readmit(self, worker: Worker) -> None:
        """A server responds again or for the first time: send it the current weights, then
        requests."""
        with self.lock:
            worker.alive = True
            evictions = worker.evictions
        try:
            version = None if self.restore is None else self.restore(worker)
        except RunError as failure:
            # alive, so that an update reaches it; until then each probe tries again
            worker.returning = True
            logger.warning(str(failure))
            return
        if version is not None:
            logger.info(f"the engine {worker.url} is back, with weights of version {version}")
            self.has_weights(worker, version, evictions)
        else:
            worker.returning = False
            logger.info(f"the engine {worker.url} answers, and gets requests after the next update")


def _valid(
    answer: Mapping[str, object], url: str, reader: Callable[[Mapping[str, object]], T]
) -> T:
    try:
        return reader(answer)
    except InvalidResponse as bad:
        raise RequestFailed(bad.kind, f"{url}: {bad}", retryable=False) from None


def log_tail(worker: Worker) -> str:
    words = "" if worker.process is None else worker.process.log_tail()
    return f"--- {worker.url}:\n{words}" if words else ""
