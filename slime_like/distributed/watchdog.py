"""Watchdog: a rank that no longer runs ends the job in bounded time; a slow one does not.

Every rank has two threads. The first writes heartbeats to the store of the rendezvous and reads
those of the next rank and of rank 0, so its work does not grow with the number of ranks. The second
never blocks and decides which ranks are dead. A process that is stopped, is blocked inside C code
with the GIL, or is on a lost host writes no heartbeats: after the limit the first rank to notice
names it, and every running rank writes the stacks of its threads and exits. A rank with a slow or
stuck main thread still writes heartbeats, which report where it is; the collectives of the other
ranks then fail after --distributed-timeout-minutes.

Values in the store are signed (`SignedStore`): values that another program writes are ignored, with
a warning. A rank that was suspended itself (SIGSTOP to the whole job, `scontrol suspend`, a closed
laptop) restarts its timers before it judges others.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from slime_like.distributed.activity import Activity, Heartbeat
from slime_like.distributed.signed_store import SignedStore

FAILED = 1
PREFIX = "watchdog"
logger = logging.getLogger(__name__)
EXIT_DELAY_S = 5.0  # for the other ranks to write their stacks before a launcher kills them


@dataclass(slots=True)
class LastHeartbeat:
    """Last heartbeat of a rank."""

    pulse: Heartbeat
    at: float  # when it changed, by this host's clock


class Watchdog:
    """Context manager around the run that starts and stops the watchdog threads.

    Args:
        store: The job's store; each thread uses its own connection.
        limit_s: Seconds without a heartbeat after which a rank counts as dead.
    """

    def __init__(
        self, store: SignedStore, rank: int, world_size: int, limit_s: float, activity: Activity
    ) -> None:
        self._store = store.clone()
        self._verdict_store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._limit_s = limit_s
        self._interval_s = min(5.0, limit_s / 6)
        self._activity = activity
        self._watched = {0, (rank + 1) % world_size} - {rank}
        self._last: dict[int, LastHeartbeat] = {}
        self._store_answered = time.monotonic()
        self._before: dict[int, Heartbeat | None] = {}
        self._is_warned = False
        self._closed = threading.Event()
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=run.__name__, daemon=True)
            for run in (self._exchange_heartbeats, self._find_dead_ranks)
        ]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._activity.changed.set()
        for thread in self._threads:
            thread.join(2.0)  # a thread may hang in the store

    def _exchange_heartbeats(self) -> None:
        """Loop of the first thread: send this rank's heartbeat, read those of the watched ranks."""
        try:
            while not self._closed.is_set():
                self._send(self._activity.pulse())
                for rank in self._watched:
                    self._receive(rank)
                verdict = self._store.read(f"{PREFIX}/verdict")
                if verdict is not None:
                    self._exit(verdict, from_peer=True)
                if self._store.read("first_error") is not None:
                    self._store.put(f"knows/{self._rank}", "1")
                self._store_answered = time.monotonic()
                self._report_slow_ranks()
                self._activity.changed.wait(self._interval_s)
                self._activity.changed.clear()
            self._send(self._activity.pulse(left=True))
        except RuntimeError:
            return  # the store is gone: collectives fail, or `_find_dead_ranks` ends this process

    def _find_dead_ranks(self) -> None:
        """Loop of the second thread: find dead ranks and an unresponsive store.

        Stacks of a process that is blocked inside C code are not written by a timer
        (faulthandler.dump_traceback_later): it would also count the time of a suspended job and
        then read the stacks of running threads, which crashes the process.
        """
        looked = time.monotonic()
        answered = self._store_answered
        unanswered_s = 0.0
        while not self._closed.wait(self._interval_s):
            looked, before = time.monotonic(), looked
            if looked - before > self._interval_s + self._limit_s / 3:
                self._restart_timers(looked - before)
                answered = self._store_answered
                unanswered_s = 0.0
                continue
            unanswered_s += looked - before
            if answered != self._store_answered:
                answered = self._store_answered
                unanswered_s = 0.0
            if unanswered_s > self._limit_s:
                self._exit(
                    f"no answer from the store of this run at {store_address()} for "
                    f"{self._limit_s:g} s{self._describe_owner(0)}",
                    from_peer=False,
                )
            silent = [
                rank
                for rank, last in self._last.items()
                if answered - last.at > self._limit_s and not last.pulse.left
            ]
            if silent:
                self._declare_dead(silent)

    def _restart_timers(self, gap_s: float) -> None:
        """Restart all timers, since this process, and perhaps the whole job, was suspended."""
        now = time.monotonic()
        for rank, last in list(self._last.items()):
            self._last[rank] = LastHeartbeat(last.pulse, now)
        if self._rank == 0:
            logger.warning(
                "the process of rank 0 did not run for %.0f s: it was suspended, or its host was; "
                "the silence of other ranks counts anew",
                gap_s,
            )

    def _send(self, pulse: Heartbeat) -> None:
        self._store.put(f"{PREFIX}/{self._rank}", pulse.to_json())

    def _receive(self, rank: int) -> None:
        """Read the heartbeat of a rank. One that disappears or goes back to an older count does not
        count as silence, because it means that another program writes to the store."""
        pulse = read_pulse(self._store, rank)
        last = self._last.get(rank)
        if last is None:
            if pulse is not None:
                self._last[rank] = LastHeartbeat(pulse, time.monotonic())
        elif pulse is None or pulse.count < last.pulse.count:
            self._last[rank] = LastHeartbeat(last.pulse, time.monotonic())
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "another program writes into the store of this run at %s, over the heartbeat "
                    "of rank %d; what it writes is ignored",
                    store_address(),
                    rank,
                )
        elif pulse.count > last.pulse.count:
            self._last[rank] = LastHeartbeat(pulse, time.monotonic())

    def _declare_dead(self, silent: Iterable[int]) -> None:
        """Write the verdict, once over all ranks; `_exchange_heartbeats` on every rank reads it and
        exits."""
        ranks = "; ".join(
            f"no sign of life from {self._last[rank].pulse.describe(rank)}"
            for rank in sorted(silent)
        )
        verdict = (
            f"{ranks}: for more than --heartbeat-timeout-s {self._limit_s:g} s its process is "
            "stopped, or its host is gone"
        )
        try:
            first = self._verdict_store.claim(f"{PREFIX}/verdict", verdict) == verdict
        except RuntimeError:  # the store is gone
            first = True
        if first:
            self._exit(verdict, from_peer=False)
        self._closed.wait(self._limit_s)  # the other thread exits

    def _describe_owner(self, rank: int) -> str:
        last = self._last.get(rank)
        return "" if last is None else f"; its process may be that of {last.pulse.describe(rank)}"

    def _exit(self, verdict: str, *, from_peer: bool) -> None:
        """Exit without exit handlers and destructors of process groups, which a hung peer could
        block."""
        if self._closed.is_set() or not self._leaving.acquire(blocking=False):
            return
        if not from_peer:
            _print(f"error: {verdict}. --load continues from the last checkpoint")
        _print(
            f"rank {self._rank} on host {socket.gethostname()} ends; it was in phase "
            f"{self._activity.phase}. Stacks of its threads:"
        )
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(EXIT_DELAY_S if not from_peer else 0.0)
        os._exit(FAILED)

    def _report_slow_ranks(self) -> None:
        """Report, once per phase and on rank 0 or 1 while it waits, the ranks that are late but
        have sent heartbeats since the last check."""
        own = self._activity.pulse()
        if self._rank > 1 or not own.waiting or own.phase_s < self._limit_s:
            self._before = {}
            return
        pulses = {rank: read_pulse(self._store, rank) for rank in range(self._world_size)}
        before = self._before
        self._before = pulses
        late = []
        for rank, pulse in pulses.items():
            old = before.get(rank)
            if pulse is None or old is None or pulse.waiting or pulse.left:
                continue
            if old.count != pulse.count:
                late.append(pulse.describe(rank))
        name = f"{self._rank} {own.count}"
        if late and self._store.claim(f"{PREFIX}/slow/{own.phases}", name) == name:
            text = (
                "slow, not gone: the others wait for "
                f"{'; '.join(late[:4])}{' ...' if late[4:] else ''}"
            )
            _print(text)


def read_pulse(store: SignedStore, rank: int) -> Heartbeat | None:
    text = store.read(f"{PREFIX}/{rank}")
    return None if text is None else Heartbeat.from_json(text)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def write_stacks_on_request() -> None:
    """Write the stacks of all threads on SIGUSR1, without ending the process, and on a crash."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
