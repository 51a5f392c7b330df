"""Which rank is gone, when a collective fails on the others. Each rank leaves its address in the store of the process group; one that fails
in an orderly way says so there; one that was killed does not."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

from slime_like.distributed.activity import Heartbeat
from slime_like.distributed.watchdog import read_pulse
from slime_like.errors import RunError

WAIT_S = 1.5  # for the others to notice too
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited|peer",
    re.IGNORECASE,
)


def leave_address(rank: int) -> None:
    default_store().set(
        f"slime_like/address/{rank}", f"host {socket.gethostname()}, process {os.getpid()}"
    )


def looks_lost(error: BaseException) -> bool:
    """Whether the error is what torch.distributed raises when another rank does not answer."""
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, RunError)
        and bool(_LOST.search(str(error)))
    )


def say_failed(rank: int) -> None:
    """This rank has failed, and is there to say it."""
    try:
        default_store().set(f"slime_like/failed/{rank}", "1")
    except RuntimeError:
        return  # the process that held the store is gone


def silent_ranks(world_size: int, wait_s: float = WAIT_S) -> list[str]:
    """Ranks that have not said that they failed, with their addresses and their last sign of life, once all others have or the time is over.
    One that waits for the others itself is not the culprit."""
    store, deadline = default_store(), time.monotonic() + wait_s
    while True:
        silent = [
            rank for rank in range(world_size) if not store.check([f"slime_like/failed/{rank}"])
        ]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    pulses = {rank: read_pulse(store, rank) for rank in silent}
    culprits = [
        rank for rank in silent if (pulse := pulses[rank]) is None or not pulse.waiting
    ] or silent
    return [_words(store, rank, pulses[rank]) for rank in culprits]


def _words(store: Any, rank: int, pulse: Heartbeat | None) -> str:
    if pulse is not None:
        return pulse.describe(rank)
    return f"rank {rank} ({store.get(f'slime_like/address/{rank}').decode()})"


def explain(error: BaseException, world_size: int) -> BaseException:
    """An error that names the ranks that are gone, where `error` comes of that."""
    if not looks_lost(error):
        return error
    try:
        silent = silent_ranks(world_size)
    except RuntimeError:
        return error
    if not silent:
        return error
    reason = str(error).splitlines()[0]
    return RunError(
        f"no answer from {', '.join(silent)}: killed, stuck, or cut off ({reason}). --load goes on from the last checkpoint"
    )


def default_store() -> Any:
    """Of the process group of all ranks."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
