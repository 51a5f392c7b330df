"""What some ranks find out, all of them know: a value, or an error that all raise. One that a
single rank raised would leave the others waiting in a collective.

A ValueError, OSError or RunError, which the user can remedy, is raised as it is. Any other one
becomes a RunError with its traceback as a note. Every function is a collective, and works without a
process group too. Values travel as pickles, inside the job.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slime_like.errors import RunError

T = TypeVar("T")
TELL_EVERY_S = 15.0  # below any --distributed-timeout-minutes that makes sense
REMEDIES = (ValueError, OSError, RunError)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, on every rank; small ones. group: of all ranks, where the default one
    is in use meanwhile."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=group)
    return found


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank; the first rank's error is raised on every rank. `action` must
    hold no collective that a failing rank would miss. group: as of `gather`."""
    result, error = _attempt(action)
    errors = gather(None if error is None else as_told(error), group)
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def from_rank_zero(find: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What `find` returns on rank 0; its error is raised on every rank. group: of all ranks, where
    the default one is in use meanwhile."""
    value, error = _attempt(find) if is_rank_zero() else (None, None)
    return share(value, error, group)  # type: ignore[return-value]


def on_rank_zero(make: Callable[[], T]) -> T | None:
    """As `from_rank_zero`, for what cannot travel: what `make` returns stays on rank 0, and is None
    elsewhere."""
    value, error = _attempt(make) if is_rank_zero() else (None, None)
    share(None, error)
    return value


def share(value: T, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value, or its error, on every rank. For what rank 0 knows before all have taken part
    in something else; else `from_rank_zero`."""
    told = None if error is None else as_told(error)
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [b""]
        if dist.get_rank() == 0:
            try:
                box = [pickle.dumps((value, told))]
            except Exception as problem:  # here, where it reaches all ranks
                told = as_told(problem)
                box = [pickle.dumps((None, told))]
        dist.broadcast_object_list(box, src=0, group=group)
        if dist.get_rank() != 0:
            value, told = pickle.loads(box[0])
    if told is not None:
        raise told
    return value


def from_rank_zero_within(
    find: Callable[[], T], group: dist.ProcessGroup | None, *, timeout_s: float, late: str
) -> T:
    """As `from_rank_zero`, for what takes long: it runs in a thread, and the other ranks hear every
    few seconds that it goes on, so that no collective takes longer than that. After timeout_s it is
    given up: RunError(late) on all ranks, and the thread is left behind."""
    ended: Future[T] = Future()

    def work() -> None:
        try:
            ended.set_result(find())
        except BaseException as error:
            ended.set_exception(error)

    def look() -> tuple[bool, T | None]:
        """Whether it has ended, and with what."""
        if wait([ended], max(0.0, min(TELL_EVERY_S, deadline - time.monotonic()))).done:
            return True, ended.result()
        if time.monotonic() >= deadline:
            raise RunError(late)
        return False, None

    deadline = time.monotonic() + timeout_s
    if is_rank_zero():
        threading.Thread(target=work, name="for all ranks", daemon=True).start()
    while True:
        has_ended, value = from_rank_zero(look, group)
        if has_ended:
            return value  # type: ignore[return-value]


def is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def as_told(error: BaseException) -> Exception:
    """As all ranks raise it. Types that other ranks may not know, those of a user's module, become
    the one that they are a kind of."""
    for kind in REMEDIES:
        if isinstance(error, kind):
            known = type(error).__module__.partition(".")[0] in (
                "builtins",
                "slime_like",
                "arguments",
            )
            return error if known else kind(str(error))
    told = RunError(f"{type(error).__name__}: {error}")
    told.add_note("".join(traceback.format_exception(error)).rstrip())
    told.__cause__ = error
    return told


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def any_rank(flags: list[bool]) -> list[bool]:
    """Elementwise or over all ranks; collective."""
    if not dist.is_initialized():
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]
