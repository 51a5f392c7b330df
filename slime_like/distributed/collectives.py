"""Collective helpers: share a value, or an exception, of one rank with all ranks. An exception on a
single rank would leave the others waiting in a collective.

ValueError, OSError and RunError, which users can fix, are raised unchanged; others become a
RunError with the traceback as a note. Every function is collective, and also works without a
process group. Values are pickled, within the job only.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch
import torch.distributed as dist

from slime_like.errors import RunError

T = TypeVar("T")
POLL_S = 15.0  # below any sensible --distributed-timeout-minutes
REMEDIES = (ValueError, OSError, RunError)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All-gather small Python objects. group: a group of all ranks, if the default is in use by
    another thread."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank; the error of the lowest failing rank is raised on all. `action`
    must not contain collectives that a failing rank would miss. group: see `gather`."""
    result, error = _attempt(action)
    errors = gather(None if error is None else _sharable(error), group)
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def from_rank_zero(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `function` on rank 0 and broadcast its result, or raise its error on every rank. group:
    see `gather`."""
    value, error = _attempt(function) if is_rank_zero() else (None, None)
    return share(value, error, group)  # type: ignore[return-value]


def on_rank_zero(function: Callable[[], T]) -> T | None:
    """As `from_rank_zero`, but the result stays on rank 0, e.g. because it cannot be pickled; None
    on other ranks."""
    value, error = _attempt(function) if is_rank_zero() else (None, None)
    share(None, error)
    return value


def share(value: T, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> T:
    """Broadcast rank 0's value, or raise its error on every rank; for a value that rank 0 already
    has. Otherwise use `from_rank_zero`."""
    error = None if error is None else _sharable(error)
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [b""]
        if dist.get_rank() == 0:
            try:
                box = [pickle.dumps((value, error))]
            except Exception as problem:  # not picklable: raised on all ranks
                error = _sharable(problem)
                box = [pickle.dumps((None, error))]
        dist.broadcast_object_list(box, src=0, group=group)
        if dist.get_rank() != 0:
            value, error = pickle.loads(box[0])
    if error is not None:
        raise error
    return value


def from_rank_zero_within(
    function: Callable[[], T], group: dist.ProcessGroup | None, *, timeout_s: float, late: str
) -> T:
    """As `from_rank_zero`, for long-running work: it runs in a thread, and rank 0 signals progress
    every few seconds, so that no collective times out. After timeout_s all ranks raise
    RunError(late) and the thread is abandoned."""
    ended: Future[T] = Future()

    def work() -> None:
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)

    def poll() -> tuple[bool, T | None]:
        """(whether the work has ended, its result)."""
        if wait([ended], max(0.0, min(POLL_S, deadline - time.monotonic()))).done:
            return True, ended.result()
        if time.monotonic() >= deadline:
            raise RunError(late)
        return False, None

    deadline = time.monotonic() + timeout_s
    if is_rank_zero():
        threading.Thread(target=work, name="for all ranks", daemon=True).start()
    while True:
        has_ended, value = from_rank_zero(poll, group)
        if has_ended:
            return value  # type: ignore[return-value]


def is_rank_zero() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _sharable(error: BaseException) -> Exception:
    """The error to raise on all ranks. Types of user modules, which other ranks may not have
    imported, are replaced by their built-in base class."""
    for kind in REMEDIES:
        if isinstance(error, kind):
            package = type(error).__module__.partition(".")[0]
            is_importable = package in ("builtins", "slime_like", "arguments")
            return error if is_importable else kind(str(error))
    shared = RunError(f"{type(error).__name__}: {error}")
    shared.add_note("".join(traceback.format_exception(error)).rstrip())
    shared.__cause__ = error
    return shared


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def any_rank(flags: list[bool]) -> list[bool]:
    """Elementwise logical or over all ranks. Collective."""
    if not dist.is_initialized():
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]
