"""A rank that no longer runs ends the job in bounded time; one that is only slow does not.

Every rank has two threads. One tells the others that the process runs, in the store that the ranks met at, and listens for the next rank and
for rank 0, so that the work does not grow with the number of ranks. The other never waits for anything; it judges. A process that is
stopped, on a host that is gone, or held up inside C code, tells nothing: after the limit the first rank to notice names it, and every rank
that still runs writes the stacks of its threads and ends. A rank whose main thread is slow or stuck goes on telling, and says where it is;
then the others' collectives decide, after --distributed-timeout-minutes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from slime_like.distributed.activity import Activity, Heartbeat

FAILED = 1
PREFIX = "slime_like/distributed/watchdog"
LEAVE_S = 5.0  # for the others to write their stacks before a launcher ends them


@dataclass(slots=True)
class LastHeartbeat:
    """Of one rank. at: when its pulse last changed, on this host's clock."""

    pulse: Heartbeat
    at: float


class Watchdog:
    """store: of the process group; each thread talks to it over a connection of its own. limit_s: seconds without a sign of life. Used as a context around the run."""

    def __init__(
        self, store: Any, rank: int, world_size: int, limit_s: float, activity: Activity
    ) -> None:
        self._store, self._judges_store = store.clone(), store.clone()
        self._rank = rank
        self._world_size = world_size
        self._limit_s = limit_s
        self._interval_s = min(5.0, limit_s / 6)
        self._activity = activity
        self._watched = {0, (rank + 1) % world_size} - {rank}
        self._heard: dict[int, LastHeartbeat] = {}
        self._store_answered = time.monotonic()
        self._before: dict[int, Heartbeat | None] = {}
        self._closed = threading.Event()
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=run.__name__, daemon=True)
            for run in (self._tell_and_listen, self._judge)
        ]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._activity.changed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(2.0)  # one may hang with the store

    def _tell_and_listen(self) -> None:
        try:
            while not self._closed.is_set():
                self._tell(self._activity.pulse())
                for rank in self._watched:
                    self._listen(rank)
                if self._store.check([f"{PREFIX}/verdict"]):
                    self._leave(self._store.get(f"{PREFIX}/verdict").decode(), told=True)
                self._store_answered = time.monotonic()
                self._name_the_slow()
                self._activity.changed.wait(self._interval_s)
                self._activity.changed.clear()
            self._tell(self._activity.pulse(left=True))
        except (
            RuntimeError
        ):  # the store is gone with its process: collectives fail, or `_judge` ends this one
            return

    def _judge(self) -> None:
        """Whatever held this process up itself, as a laptop's lid does, is not held against the others: time counts in which it looked."""
        looked, answered, unanswered_s = time.monotonic(), self._store_answered, 0.0
        while not self._closed.wait(self._interval_s):
            # held up inside C code, this process cannot judge: then this timer, which needs no Python, writes the stacks and ends it
            faulthandler.dump_traceback_later(2 * self._limit_s, exit=True)
            looked, before = time.monotonic(), looked
            unanswered_s += min(looked - before, 2 * self._interval_s)
            if answered != self._store_answered:
                answered, unanswered_s = self._store_answered, 0.0
            if unanswered_s > self._limit_s:
                self._leave(
                    f"no answer from the store of this run at {store_address()} for {self._limit_s:g} s{self._last_words(0)}",
                    told=False,
                )
            silent = [
                rank
                for rank, heard in self._heard.items()
                if answered - heard.at > self._limit_s and not heard.pulse.left
            ]
            if silent:
                self._condemn(silent)

    def _tell(self, pulse: Heartbeat) -> None:
        self._store.set(f"{PREFIX}/{self._rank}", pulse.to_json())

    def _listen(self, rank: int) -> None:
        pulse = read_pulse(self._store, rank)
        if pulse is not None and (
            rank not in self._heard or self._heard[rank].pulse.count != pulse.count
        ):
            self._heard[rank] = LastHeartbeat(pulse, time.monotonic())

    def _condemn(self, silent: Iterable[int]) -> None:
        """Write the verdict, once over all ranks; `_tell_and_listen` of every rank finds it and leaves."""
        words = "; ".join(
            f"no sign of life from {self._heard[rank].pulse.describe(rank)}"
            for rank in sorted(silent)
        )
        verdict = f"{words}: for more than --heartbeat-timeout-s {self._limit_s:g} s its process is stopped, or its host is gone"
        try:
            first = self._judges_store.add(f"{PREFIX}/verdicts", 1) == 1
            if first:
                self._judges_store.set(f"{PREFIX}/verdict", verdict)
        except RuntimeError:  # the store is gone
            first = True
        if first:
            self._leave(verdict, told=False)
        self._closed.wait(self._limit_s)  # the other thread leaves

    def _last_words(self, rank: int) -> str:
        heard = self._heard.get(rank)
        return "" if heard is None else f"; its process may be that of {heard.pulse.describe(rank)}"

    def _leave(self, verdict: str, *, told: bool) -> None:
        """End this process, without what a hung peer could hold up: exit handlers, destructors of process groups."""
        if self._closed.is_set() or not self._leaving.acquire(blocking=False):
            return
        head = f"rank {self._rank} on host {socket.gethostname()}"
        if not told:
            print(
                f"error: {verdict}. --load goes on from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
        print(
            f"{head} ends; it was in phase {self._activity.phase}. Stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(LEAVE_S if not told else 0.0)
        os._exit(FAILED)

    def _name_the_slow(self) -> None:
        """Once for each phase, by rank 0 or 1 where it waits: who is late and has given signs of life since the last look."""
        mine = self._activity.pulse()
        if self._rank > 1 or not mine.waiting or mine.phase_s < self._limit_s:
            self._before = {}
            return
        pulses = {rank: read_pulse(self._store, rank) for rank in range(self._world_size)}
        before, self._before = self._before, pulses
        late = [
            pulse.describe(rank)
            for rank, pulse in pulses.items()
            if pulse is not None
            and not pulse.waiting
            and not pulse.left
            and (old := before.get(rank)) is not None
            and old.count != pulse.count
        ]
        if late and self._store.add(f"{PREFIX}/slow/{mine.phases}", 1) == 1:
            print(
                f"slow, not gone: the others wait for {'; '.join(late[:4])}{' ...' if late[4:] else ''}",
                file=sys.stderr,
                flush=True,
            )


def read_pulse(store: Any, rank: int) -> Heartbeat | None:
    key = f"{PREFIX}/{rank}"
    return Heartbeat.from_json(store.get(key)) if store.check([key]) else None


def store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def write_stacks_on_request() -> None:
    """kill -USR1 writes the stacks of all threads and goes on; a crash writes them too."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
