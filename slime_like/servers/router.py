"""sglang_router: generation requests go through it; it routes to servers that are ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import quote

from slime_like.checked_json import InvalidResponse, read
from slime_like.errors import RunError
from slime_like.servers.control_answers import RouterWorker, RouterWorkers
from slime_like.servers.http import ControlClient, RequestFailed
from slime_like.servers.processes import Launch, ServerProcess

logger = logging.getLogger(__name__)

CALL_S = 10.0
ADD_S = 60.0  # the router probes a server before it takes it


class Router:
    """An external router, or one that is started here and ended with the run."""

    def __init__(self, url: str, launch: Launch | None, connect_s: float) -> None:
        self.url = url
        self._control = ControlClient(connect_s)
        self._process = None if launch is None else ServerProcess(launch)

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that only this run adds servers to it."""
        return self._process is not None

    def start(self, timeout_s: float) -> None:
        """Wait until it answers. Raises RunError."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = None if self._process is None else self._process.exit_status
            if self._process is not None and status is not None:
                raise RunError(
                    f"the router {self.url} ended with status {status} while it started:\n"
                    f"{self._process.log_tail()}"
                )
            try:
                self.workers()
                return
            except RequestFailed as failure:
                if time.monotonic() > deadline:
                    raise RunError(f"the router {self.url} does not answer: {failure}") from None
            time.sleep(0.1)

    def workers(self) -> list[str]:
        """Addresses of the servers that it routes to. Raises RequestFailed."""
        return [worker.url for worker in self._workers() if worker.is_healthy]

    def _workers(self) -> list[RouterWorker]:
        url = f"{self.url}/workers"
        answer = self._control.call(url, timeout_s=CALL_S, method="GET")
        try:
            return read(RouterWorkers, answer).workers
        except InvalidResponse as bad:
            raise RequestFailed(bad.kind, f"{url}: {bad}", retryable=False) from None

    def add(self, worker: str) -> None:
        """Add a server; returns once the router routes to it. Raises RunError."""
        try:
            if worker in self.workers():
                return
            self._control.call(f"{self.url}/workers", {"url": worker}, timeout_s=CALL_S)
            self._wait(lambda: worker in self.workers())
        except RequestFailed as failure:
            raise RunError(f"the router does not take the engine {worker}: {failure}") from None

    def remove(self, worker: str) -> None:
        """Remove a server. An unreachable router, or an unknown server, is fine: it gets no
        requests either way."""
        try:
            for each in self._workers():
                if each.url == worker:
                    url = f"{self.url}/workers/{quote(str(each.id), safe='')}"
                    self._control.call(url, timeout_s=CALL_S, method="DELETE")
            self._wait(lambda: all(each.url != worker for each in self._workers()))
        except RequestFailed as failure:
            logger.warning(f"the router did not let go of the engine {worker}: {failure}")

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
        self._control.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ADD_S
        while not done():
            if time.monotonic() > deadline:
                raise RequestFailed(
                    "router", f"{self.url}: no effect within {ADD_S:g} s", retryable=False
                )
            time.sleep(0.05)
