"""Find the lost rank when a collective fails on the others. Each rank writes its address to the
store of the process group; a rank that fails with an error marks this there, a killed one does
not."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from slime_like.distributed.activity import Heartbeat
from slime_like.distributed.collectives import from_rank_zero
from slime_like.distributed.rendezvous import environment_meeting
from slime_like.distributed.signed_store import KEY_VARIABLE, SignedStore
from slime_like.distributed.watchdog import read_pulse
from slime_like.errors import RunError

WAIT_S = 1.5  # for the others to notice too
LINGER_S = 6.0  # longer than the watchdogs' interval
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited|peer",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Job:
    """What this process knows of the ranks that it has met. rank_zero: its address, for when its
    store is gone."""

    store: SignedStore
    rank: int
    world_size: int
    rank_zero: str


_job: Job | None = None


def leave_address(rank: int) -> None:
    """Make the job's signed store and leave this process's address in it. Collective.

    The key comes from the environment (SLIME_LIKE_JOB_KEY), else rank 0 makes one and sends it over
    the process group, never through the store, which anybody who reaches its port may read.
    """
    global _job
    mine = f"host {socket.gethostname()}, process {os.getpid()}"
    given = os.environ.get(KEY_VARIABLE, "").encode()
    key, rank_zero = from_rank_zero(lambda: (given or secrets.token_bytes(32), mine))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    _job = Job(SignedStore(default_store(), key), rank, world_size, rank_zero)
    _job.store.put(f"address/{rank}", mine)


def job() -> Job:
    """Of this process; `leave_address` has made it."""
    assert _job is not None
    return _job


def looks_lost(error: BaseException) -> bool:
    """Whether the error is what torch.distributed raises when another rank does not answer."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and bool(_LOST.search(str(error)))
    )


def message_of(error: Exception) -> BaseException | None:
    """The error that this rank shows: one rank shows it for all. None where another rank does.

    Where the store is gone, rank 0 held it and was killed, or its host is lost: an orderly end
    waits for the others (`linger`). Then each of the others has to say so.
    """
    me = job()
    try:
        me.store.put(f"failed/{me.rank}", "1")
        if not is_first_to_fail():
            return None
        return _explained(error, me.world_size)
    except RuntimeError:
        if not looks_lost(error):
            return error
        reason = str(error).splitlines()[0]
        return RunError(
            f"rank {me.rank} on host {socket.gethostname()} has no answer from rank 0 ({me.rank_zero}), which holds the store of this run: "
            f"killed, or its host is gone ({reason}). --load continues from the last checkpoint"
        )


def is_first_to_fail() -> bool:
    """True on one rank only: an error that all ranks meet is shown once, and so is one that the
    others see as a lost connection. Raises RuntimeError where the store is gone."""
    me = job()
    return me.store.claim("first_error", str(me.rank)) == str(me.rank)


def linger(wait_s: float) -> None:
    """Rank 0, where its process holds the store: end after the others have read what it left there."""
    me, meeting = job(), environment_meeting()
    if meeting is None or not meeting.hosts:
        return
    deadline = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline and not all(
            me.store.read(f"failed/{rank}") or me.store.read(f"knows/{rank}")
            for rank in range(me.world_size)
        ):
            time.sleep(0.05)
    except RuntimeError:
        return


def silent_ranks(world_size: int, wait_s: float = WAIT_S) -> list[str]:
    """Ranks that have not marked that they failed, with their addresses and their last sign of
    life, once all others have or the time is over. One that waits for the others itself is not the
    culprit."""
    store, deadline = job().store, time.monotonic() + wait_s
    while True:
        silent = [rank for rank in range(world_size) if store.read(f"failed/{rank}") is None]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    pulses = {rank: read_pulse(store, rank) for rank in silent}
    culprits = [
        rank for rank in silent if (pulse := pulses[rank]) is None or not pulse.waiting
    ] or silent
    return [_words(store, rank, pulses[rank]) for rank in culprits]


def _words(store: SignedStore, rank: int, pulse: Heartbeat | None) -> str:
    if pulse is not None:
        return pulse.describe(rank)
    return f"rank {rank} ({store.read(f'address/{rank}') or 'address unknown'})"


def explain(error: BaseException, world_size: int) -> BaseException:
    """An error that names the ranks that are gone, where `error` comes of that."""
    try:
        return _explained(error, world_size)
    except RuntimeError:  # the store is gone
        return error


def _explained(error: BaseException, world_size: int) -> BaseException:
    if not looks_lost(error):
        return error
    silent = silent_ranks(world_size)
    if not silent:
        return error
    reason = str(error).splitlines()[0]
    return RunError(
        f"no answer from {', '.join(silent)}: killed, stuck, or cut off ({reason}). --load "
        "continues from the last checkpoint"
    )


def default_store() -> object:
    """Of the process group of all ranks."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
