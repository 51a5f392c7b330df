"""Find the lost rank when a collective fails on the others. Each rank writes its address to the
store of the process group. A rank that fails with an error records this there; a killed one
cannot."""

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
from slime_like.distributed.rendezvous import environment_rendezvous
from slime_like.distributed.signed_store import KEY_VARIABLE, SignedStore
from slime_like.distributed.watchdog import read_pulse
from slime_like.errors import RunError

WAIT_S = 1.5  # for the other ranks to notice the failure too
LINGER_S = 6.0  # longer than the watchdogs' interval
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|socket"
    r"|remote process exited|peer",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Job:
    """The job of this process."""

    store: SignedStore
    rank: int
    world_size: int
    rank_zero: str  # address of rank 0, in case its store is gone


_job: Job | None = None


def join_job(rank: int) -> None:
    """Create the job's signed store and write this process's address to it. Collective.

    The key comes from the environment (SLIME_LIKE_JOB_KEY), or rank 0 generates one and broadcasts
    it over the process group; never through the store, which anyone who can reach its port can
    read.
    """
    global _job
    address = f"host {socket.gethostname()}, process {os.getpid()}"
    key = os.environ.get(KEY_VARIABLE, "").encode()
    key, rank_zero = from_rank_zero(lambda: (key or secrets.token_bytes(32), address))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    _job = Job(SignedStore(default_store(), key), rank, world_size, rank_zero)
    _job.store.put(f"address/{rank}", address)


def job() -> Job:
    """The job of this process, set by `join_job`."""
    assert _job is not None
    return _job


def looks_lost(error: BaseException) -> bool:
    """Whether torch.distributed raised the error because another rank does not respond."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and bool(_LOST.search(str(error)))
    )


def reported_error(error: Exception) -> BaseException | None:
    """The error for this rank to report; None if another rank reports it for all.

    If the store is gone, rank 0, which held it, was killed or its host is lost: in an orderly end
    rank 0 waits for the other ranks (`linger`). In this case every other rank reports it.
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
            f"rank {me.rank} on host {socket.gethostname()} has no answer from rank 0 "
            f"({me.rank_zero}), which holds the store of this run: killed, or its host is gone "
            f"({reason}). --load continues from the last checkpoint"
        )


def is_first_to_fail() -> bool:
    """True on one rank only, so that an error on all ranks, or one that the others see as a lost
    connection, is reported once. Raises RuntimeError if the store is gone."""
    me = job()
    return me.store.claim("first_error", str(me.rank)) == str(me.rank)


def linger(wait_s: float) -> None:
    """Wait, on rank 0 if it holds the store, until the other ranks have failed too or have read the
    first error, for at most wait_s."""
    me = job()
    rendezvous = environment_rendezvous()
    if rendezvous is None or not rendezvous.hosts:
        return

    def is_informed(rank: int) -> bool:
        return bool(me.store.read(f"failed/{rank}") or me.store.read(f"knows/{rank}"))

    deadline = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline and not all(map(is_informed, range(me.world_size))):
            time.sleep(0.05)
    except RuntimeError:
        return


def silent_ranks(world_size: int, wait_s: float = WAIT_S) -> list[str]:
    """Descriptions (address, last heartbeat) of the ranks that have not recorded a failure within
    wait_s. Ranks that wait for others themselves are omitted unless all do."""
    store = job().store
    deadline = time.monotonic() + wait_s
    while True:
        silent = [rank for rank in range(world_size) if store.read(f"failed/{rank}") is None]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    pulses = {rank: read_pulse(store, rank) for rank in silent}
    culprits = {rank: p for rank, p in pulses.items() if p is None or not p.waiting}
    return [_describe(store, rank, pulse) for rank, pulse in (culprits or pulses).items()]


def _describe(store: SignedStore, rank: int, pulse: Heartbeat | None) -> str:
    if pulse is not None:
        return pulse.describe(rank)
    return f"rank {rank} ({store.read(f'address/{rank}') or 'address unknown'})"


def explain(error: BaseException, world_size: int) -> BaseException:
    """An error that names the lost ranks if they caused `error`, otherwise `error`."""
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


def default_store() -> dist.Store:
    """The store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
