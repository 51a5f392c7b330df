"""What ranks leave for each other in torch's store, when another program writes there too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from slime_like.distributed.signed_store import SignedStore
from tests.paths import ROOT

KEY = b"known to the ranks"
GARBAGE = ["", "-", "x", "{}", "0" * 64 + " text", "\0\n", "é" * 1000, "[" * 100_000]


def tcp_store() -> dist.Store:
    return dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )


@pytest.mark.parametrize("make", [dist.HashStore, tcp_store])
def test_values_of_the_job_are_read_and_others_are_absent(make: type[dist.Store]) -> None:
    raw = make()
    store = SignedStore(dist.PrefixStore("attempt_0", raw), KEY)
    assert store.read("verdict") is None
    store.put("verdict", "rank 1 is gone é\n")
    assert store.read("verdict") == "rank 1 is gone é\n"
    stranger = SignedStore(dist.PrefixStore("attempt_0", raw), b"another key")
    assert stranger.read("verdict") is None
    for text in GARBAGE:
        raw.set("attempt_0/slime_like/verdict", text)
        assert store.read("verdict") is None
        raw.set("attempt_0/slime_like/first", text)
        assert store.claim("first", "rank 0") == "rank 0", "a claim replaces what no rank wrote"
        assert store.claim("first", "rank 1") == "rank 0"
    store.put("one", "text")
    moved = raw.get("attempt_0/slime_like/one")
    raw.set("attempt_0/slime_like/two", moved.decode())
    assert store.read("two") is None, "signed under another name"


def test_one_of_many_is_first() -> None:
    raw, found, start = tcp_store(), [], threading.Barrier(4)

    def claim(rank: int) -> None:
        store = SignedStore(raw, KEY).clone()
        start.wait()
        found.append(store.claim("first_error", str(rank)))

    threads = [threading.Thread(target=claim, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


# Two watchdogs over one store, and a third connection that writes without the key. argv: what
# happens
TWO_RANKS = """
import logging, os, sys, threading, time
import torch.distributed as dist
from slime_like.distributed.activity import Activity
from slime_like.distributed.signed_store import SignedStore
from slime_like.distributed.watchdog import Watchdog
from slime_like.logs import set_up_logging

set_up_logging(0)
raw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
LIMIT_S = 6.0
dogs = [Watchdog(SignedStore(raw, b"key"), rank, 2, LIMIT_S, Activity()) for rank in (0, 1)]
with dogs[0], dogs[1]:
    while not all(dog._last for dog in dogs):
        time.sleep(0.05)
    print("both run", flush=True)
    if sys.argv[1] == "garbage":
        old = raw.get("slime_like/watchdog/1").decode()
        bad = ["", "{}", "null", "[" * 10000, "0" * 64 + " {}", old]
        end = time.monotonic() + 2.5 * LIMIT_S
        while time.monotonic() < end or not all(dog._is_warned for dog in dogs):
            for name in ("0", "1", "verdict", "verdicts", "slow/1"):
                raw.set("slime_like/watchdog/" + name, bad[int(10 * time.monotonic()) % len(bad)])
            raw.set("slime_like/first_error", "x")
            time.sleep(0.02)
    else:
        sys.stdin.readline()  # suspended meanwhile
        for _ in range(20):
            time.sleep(LIMIT_S / 6)
    assert all(thread.is_alive() for dog in dogs for thread in dog._threads)
print("nobody was blamed", flush=True)
"""


def two_ranks(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TWO_RANKS, what],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_watchdogs_ignore_what_others_write() -> None:
    """Garbage in every value, longer than the limit for silence and until both have seen it: it
    ended both threads, or the run."""
    with two_ranks("garbage") as process:
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 0 and output.endswith("nobody was blamed\n"), output
    assert output.count("another program writes into the store of this run") == 2, output


@pytest.mark.extended
def test_a_job_that_is_suspended_as_a_whole_blames_nobody() -> None:
    """Longer than twice the limit: a timer of faulthandler ended the process then, or crashed it
    while it read running threads."""
    with two_ranks("suspended") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "both run\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            threading.Event().wait(15)  # of time that passes for a process that is stopped
        finally:
            os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate("\n", timeout=280)
    assert process.returncode == 0 and output.endswith("nobody was blamed\n"), output
    assert "the process of rank 0 did not run for 1" in output
