"""Which servers there are, which of them may answer, and what happens when one of them does not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from slime_like.errors import RunError
from slime_like.rollout.engines.checked_json import BadAnswer
from slime_like.rollout.engines.sglang.http import ANSWER_BYTES, ControlClient, RequestFailed
from slime_like.rollout.engines.sglang.processes import EngineProcess
from slime_like.rollout.engines.sglang.router import Router

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_RESTARTS = 3  # of one server in a run
MAX_WRONG_VERSIONS = 3  # evictions for answers under other weights, after which a server stays out
PROCESS_LOOK_S = 0.5


@dataclass(slots=True, eq=False)
class Worker:
    """One server. version: of the weights that it is known to have; None: unknown, it gets no
    requests. in_flight: requests sent to it directly, by the tasks that wait for them. strikes:
    probes without an answer, in a row. evictions: how often it was out. wrong_versions: how often
    that was for an answer under weights that it cannot have. returning: it is out for that, and
    gets the weights at the next probe."""

    url: str
    process: EngineProcess | None = None
    alive: bool = False
    version: int | None = None
    strikes: int = 0
    restarts: int = 0
    evictions: int = 0
    wrong_versions: int = 0
    returning: bool = False
    in_flight: set[asyncio.Task[object]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """interval_s: between two probes of a server; timeout_s: of one probe; start_s: for a server to
    start; strikes: probes without an answer after which a server is out."""

    interval_s: float = 10.0
    timeout_s: float = 10.0
    start_s: float = 600.0
    strikes: int = 3


class Fleet:
    """Servers by address, and ones that were started for it, which it ends; joined_by_router: also
    those that somebody adds to the router. Every change of a worker's state happens under `lock`: three threads come here,
    the training thread, the one with the event loop, and the one that watches."""

    def __init__(
        self, addresses: Sequence[str], started: Sequence[tuple[str, EngineProcess]], router: Router | None, health: HealthSettings,
        connect_s: float, *, joined_by_router: bool = False,
    ) -> None:  # fmt: skip
        self.router = router
        self.joined_by_router = joined_by_router
        self.health = health
        self.lock = threading.RLock()
        self.version = -1  # of the weights that requests are answered with
        # Gives one server the weights of the latest update and tells their version, or None when it
        # could not; None: only an update of all can
        self.restore: Callable[[Worker], int | None] | None = None
        self.connect_s = connect_s
        self._control = ControlClient(connect_s)
        self._stop = threading.Event()
        self._wake = threading.Event()  # the next look comes at once
        self._router_trouble = ""
        self._watcher: threading.Thread | None = None
        self.workers = [Worker(url) for url in addresses] + [
            Worker(url, process) for url, process in started
        ]

    def start(self) -> None:
        """Wait until every server answers, then watch them. Raises RunError naming those that do
        not."""
        deadline = time.monotonic() + self.health.start_s
        waiting = list(self.workers)
        while waiting:
            for worker in waiting:
                status = None if worker.process is None else worker.process.exit_status
                if status is not None:
                    raise RunError(
                        f"the engine {worker.url} ended with status {status} while it started:\n{last_words(worker)}"
                    )
            waiting = [worker for worker in waiting if not self.answers(worker)]
            if waiting and time.monotonic() > deadline:
                names = ", ".join(worker.url for worker in waiting)
                raise RunError(
                    f"no answer from the engines {names} within {self.health.start_s:g} s (--rollout-health-check-first-wait)\n"
                    + "\n".join(last_words(worker) for worker in waiting)
                )
            if waiting:
                time.sleep(0.25)
        for worker in self.workers:
            worker.alive = True
        self.take_added()
        self._watcher = threading.Thread(target=self._watch, name="sglang-health", daemon=True)
        self._watcher.start()

    def alive(self) -> list[Worker]:
        with self.lock:
            return [worker for worker in self.workers if worker.alive]

    def ready(self) -> list[Worker]:
        """Those that may answer requests now."""
        with self.lock:
            return [
                worker for worker in self.workers if worker.alive and worker.version == self.version
            ]

    @property
    def evictions(self) -> int:
        return sum(worker.evictions for worker in self.workers)

    def may_recover(self) -> bool:
        """Whether a server without the current weights may get them before the next update."""
        with self.lock:
            returning = any(worker.returning for worker in self.workers)
        return self.restore is not None and (returning or self.starts_again())

    def starts_again(self) -> bool:
        """Whether a server that is out may be started again."""
        with self.lock:
            return any(
                w.process is not None
                and w.restarts <= MAX_RESTARTS
                and w.wrong_versions < MAX_WRONG_VERSIONS
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
    ) -> dict[str, object]:
        """A control call: the object that answers it, empty where nothing does. Raises
        RequestFailed."""
        return self._control.call(
            worker.url + path,
            body if body is not None else {},
            timeout_s=timeout_s,
            method=method,
            max_bytes=max_bytes,
        )

    def ask(
        self,
        worker: Worker,
        path: str,
        read: Callable[[dict[str, object]], T],
        *,
        timeout_s: float,
        body: object = None,
    ) -> T:
        """What `read` takes from the answer of a GET, or of a POST where there is a body. Raises
        RequestFailed, also where `read` raises BadAnswer."""
        method = "GET" if body is None else "POST"
        answer = self.call(worker, path, body, timeout_s=timeout_s, method=method)
        try:
            return read(answer)
        except BadAnswer as bad:
            raise RequestFailed("bad_answer", f"{worker.url}{path}: {bad}", again=False) from None

    def answers(self, worker: Worker, timeout_s: float | None = None) -> bool:
        """Whether the server answers a health probe."""
        return self._control.is_reached(
            f"{worker.url}/health", self.health.timeout_s if timeout_s is None else timeout_s
        )

    def has_weights(self, worker: Worker, version: int) -> None:
        """Let it answer requests."""
        with self.lock:
            worker.version, worker.returning = version, False
        if self.router is not None:
            self.router.add(worker.url)

    def evict(self, worker: Worker, why: str) -> None:
        """No more requests; those that wait for it go elsewhere. One that we started is started
        again."""
        with self.lock:
            if not worker.alive and worker.version is None:
                return
            worker.alive, worker.version, worker.strikes = False, None, 0
            worker.evictions += 1
            for task in worker.in_flight:
                with contextlib.suppress(RuntimeError):  # its event loop has ended
                    task.get_loop().call_soon_threadsafe(task.cancel, "evicted")
        logger.warning(f"the engine {worker.url} is out: {why}")
        if self.router is not None:
            self.router.remove(worker.url)

    def distrust(self, worker: Worker, evictions: int, why: str) -> None:
        """Evict a server that answered under weights that it cannot have. It gets the current ones
        and requests again, the first times. evictions: as they were when it was asked; where there
        were more since, the answer is of before them."""
        with self.lock:
            if worker.evictions != evictions:
                return
            worker.wrong_versions += 1
            worker.returning = worker.wrong_versions < MAX_WRONG_VERSIONS
            ends = "" if worker.returning else f"; after {worker.wrong_versions} times it stays out"
            self.evict(worker, why + ends)
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._watcher is not None:
            self._watcher.join(self.health.timeout_s + 5)
        if self.router is not None:
            self.router.close()
        processes = [w.process for w in self.workers if w.process is not None]
        if processes:
            with ThreadPoolExecutor(len(processes)) as threads:
                list(threads.map(lambda process: process.end(), processes))
        self._control.close()

    def _watch(self) -> None:
        """In a thread of its own: probe every server, again and again, and between the probes see
        whether those started here still run."""
        next_probe = 0.0
        while not self._stop.is_set():
            woken = self._wake.wait(min(PROCESS_LOOK_S, self.health.interval_s))
            self._wake.clear()
            probes = woken or time.monotonic() >= next_probe
            if probes:
                next_probe = time.monotonic() + self.health.interval_s
                self._guarded("the servers of the router", self.take_added)
            for worker in list(self.workers):
                if self._stop.is_set():
                    return
                look = functools.partial(self._look_after, worker, probe=probes)
                self._guarded(f"the engine {worker.url}", look)

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        """The watch goes on whatever one server does."""
        try:
            action()
        except Exception as error:
            logger.warning(f"watching {what}: {type(error).__name__}: {error}")

    def take_added(self) -> None:
        """A server that somebody added to their router gets no requests through it until it has the
        current weights, or where it is none of this run's."""
        if self.router is None or self.router.is_ours:
            return
        try:
            added = [
                url
                for url in self.router.workers()
                if url not in {worker.url for worker in self.workers}
            ]
        except RequestFailed as failure:  # a router that is gone adds none
            if failure.kind == "bad_answer" and self._router_trouble != str(failure):
                self._router_trouble = str(failure)
                logger.warning(f"the router does not tell its engines: {failure}")
            return
        for url in added:
            self.router.remove(url)
            if self.joined_by_router:
                with self.lock:
                    self.workers.append(Worker(url))
                logger.info(
                    f"the engine {url} was added to the router {self.router.url} and belongs to this run now"
                )
            else:
                logger.warning(
                    f"the engine {url} is none of this run's: the router {self.router.url} was told to send it nothing"
                )

    def _look_after(self, worker: Worker, *, probe: bool) -> None:
        status = None if worker.process is None else worker.process.exit_status
        if status is not None:
            self.evict(worker, f"its process ended with status {status}")
            self._restart(worker)
            return
        if not probe:
            return
        if self.answers(worker):
            worker.strikes = 0
            if not worker.alive and worker.wrong_versions < MAX_WRONG_VERSIONS:
                self._welcome(worker)
            return
        worker.strikes += 1
        if worker.alive and worker.strikes >= self.health.strikes:
            self.evict(
                worker,
                f"{self.health.strikes} health probes without an answer within {self.health.timeout_s:g} s each",
            )
            if worker.process is not None:
                worker.process.end()
                self._restart(worker)

    def _restart(self, worker: Worker) -> None:
        assert worker.process is not None
        if worker.restarts >= MAX_RESTARTS or self._stop.is_set():
            return
        worker.restarts += 1
        logger.warning(
            f"the engine {worker.url} is started again ({worker.restarts} of {MAX_RESTARTS})"
        )
        worker.process = worker.process.again()

    def _welcome(self, worker: Worker) -> None:
        """A server that is back, or late: it gets requests once it has the current weights."""
        with self.lock:
            worker.alive = True
        version = None if self.restore is None else self.restore(worker)
        if version is not None:
            logger.info(f"the engine {worker.url} is back, with weights of version {version}")
            self.has_weights(worker, version)
        else:
            logger.info(
                f"the engine {worker.url} answers, and gets requests after the next weight update"
            )


def last_words(worker: Worker) -> str:
    words = "" if worker.process is None else worker.process.last_words()
    return f"--- {worker.url}:\n{words}" if words else ""
