"""Servers on nodes other than rank 0's. Rank 0 writes the desired servers to the run's signed
store; the first rank of each node starts and stops them and writes their state back."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime_like.distributed.signed_store import SignedStore
from slime_like.servers.processes import END_S, EngineProcess, Launch, ServerProcess

logger = logging.getLogger(__name__)

POLL_S = 0.25
SLACK_S = 4.0  # for rank 0 to learn that a server has ended


def _wanted_key(rank: int) -> str:
    return f"servers/{rank}/wanted"


def _state_key(rank: int) -> str:
    return f"servers/{rank}/state"


class NodeAgent:
    """Runs the servers of one node, in a thread on the node's first rank. rank: this rank."""

    def __init__(self, store: SignedStore, rank: int) -> None:
        self._store = store.clone()
        self._rank = rank
        self._stop = threading.Event()
        # server number -> (attempt, process)
        self._running: dict[str, tuple[int, ServerProcess]] = {}
        self._failed: dict[str, dict[str, object]] = {}
        self._reported: dict[str, object] = {}
        self._thread = threading.Thread(target=self._run, name="node-servers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when its servers have ended."""
        self._stop.set()
        self._thread.join(END_S + SLACK_S)

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                self._reconcile(json.loads(self._store.read(_wanted_key(self._rank)) or "{}"))
                self._report()
        except RuntimeError as error:  # the store is gone, and rank 0 with it
            logger.warning("the servers of this node are ended: %s", str(error).splitlines()[0])
        self._reconcile({})
        with contextlib.suppress(RuntimeError):
            self._report()

    def _reconcile(self, wanted: Mapping[str, Any]) -> None:
        """Start and stop servers to match the desired state."""
        attempts = {number: launch["attempt"] for number, launch in wanted.items()}
        old = [n for n, (attempt, _) in self._running.items() if attempts.get(n) != attempt]
        if old:
            with ThreadPoolExecutor(len(old)) as threads:
                list(threads.map(lambda n: self._running.pop(n)[1].end(), old))
        self._failed = {n: f for n, f in self._failed.items() if attempts.get(n) == f["attempt"]}
        for number, launch in wanted.items():
            if number in self._running or number in self._failed:
                continue
            try:
                command = tuple(launch["command"])
                to_start = Launch(command, Path(launch["log"]), launch["environment"])
                process = ServerProcess(to_start)
                self._running[number] = (launch["attempt"], process)
            except OSError as error:
                self._failed[number] = {
                    "attempt": launch["attempt"],
                    "status": 127,
                    "output": str(error),
                }

    def _report(self) -> None:
        state: dict[str, object] = dict(self._failed)
        for number, (attempt, process) in self._running.items():
            status = process.exit_status
            output = "" if status is None else process.log_tail()
            state[number] = {"attempt": attempt, "status": status, "output": output}
        if state != self._reported:
            self._store.put(_state_key(self._rank), json.dumps(state))
            self._reported = state


class RemoteNode:
    """Rank 0's view of the servers on another node."""

    def __init__(self, store: SignedStore, rank: int, address: str) -> None:
        self.rank = rank
        self.address = address
        self._store = store.clone()
        self._launches: dict[str, object] = {}
        self._attempts = 0
        self._lock = threading.Lock()

    def start(self, number: int, launch: Launch) -> int:
        """Request a server; returns the attempt number."""
        with self._lock:
            self._attempts += 1
            self._request(
                number,
                {
                    "attempt": self._attempts,
                    "command": launch.command,
                    "log": str(launch.log),
                    "environment": dict(launch.environment),
                },
            )
            return self._attempts

    def end(self, number: int) -> None:
        with self._lock:
            self._request(number, None)

    def state(self, number: int) -> dict[str, Any] | None:
        """Attempt, exit status (None: running) and last output of a server; None: not started."""
        with self._lock:
            states = json.loads(self._store.read(_state_key(self.rank)) or "{}")
        return states.get(str(number))

    def _request(self, number: int, launch: dict[str, object] | None) -> None:
        self._launches.pop(str(number), None)
        if launch is not None:
            self._launches[str(number)] = launch
        self._store.put(_wanted_key(self.rank), json.dumps(self._launches))


class RemoteProcess(EngineProcess):
    """A server on another node. number: its number on that node."""

    def __init__(self, node: RemoteNode, number: int, launch: Launch) -> None:
        self.sender = node.rank
        self._node = node
        self._number = number
        self._launch = launch
        self._attempt = node.start(number, launch)

    @property
    def exit_status(self) -> int | None:
        state = self._node.state(self._number)
        return state["status"] if state is not None and state["attempt"] == self._attempt else None

    def log_tail(self, characters: int = 600) -> str:
        state = self._node.state(self._number)
        where = f"its output is in {self._launch.log} on {self._node.address}"
        return f"{'' if state is None else state['output'][-characters:]}\n({where})".lstrip()

    def end(self) -> None:
        deadline = time.monotonic() + END_S + SLACK_S
        with contextlib.suppress(RuntimeError):  # its node is gone, and the store with it
            self._node.end(self._number)
            while self._node.state(self._number) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def restart(self) -> RemoteProcess:
        return RemoteProcess(self._node, self._number, self._launch)
