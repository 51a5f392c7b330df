"""What rank 0 finds for all ranks: a value, or an error that all of them raise."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from slime_like.errors import RunError

TELL_EVERY_S = 15.0  # below any --distributed-timeout-minutes that makes sense


@dataclass(slots=True)
class _Outcome:
    value: Any = None
    wrong_value: str | None = None  # the text of a ValueError
    failed: str | None = None  # of another error


def on_rank_0(function: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """The plain value that rank 0 finds, on all ranks. Its error is raised on all of them: ValueError, or RunError in place of others."""
    if not dist.is_initialized():
        return function()
    return _read(_broadcast(_try(function) if dist.get_rank() == 0 else None, group))


def on_rank_0_within(function: Callable[[], Any], group: dist.ProcessGroup | None, *, timeout_s: float, what: str) -> Any:
    """As `on_rank_0`, for what takes long: it runs in a thread, and the other ranks hear every few seconds that it goes on, so that no
    collective takes longer than that. After timeout_s it is given up: RunError on all ranks, and the thread is left behind."""
    box: list[_Outcome] = []
    thread = threading.Thread(target=lambda: box.append(_try(function)), name="rollout function", daemon=True)
    if dist.get_rank() == 0:
        thread.start()
    waited = 0.0
    while True:
        outcome = None
        if dist.get_rank() == 0:
            pause = min(TELL_EVERY_S, timeout_s - waited)
            thread.join(pause)
            waited += pause
            if not thread.is_alive():
                outcome = box[0]
            elif waited >= timeout_s:
                outcome = _Outcome(failed=f"{what} took longer than --rollout-function-timeout-s {timeout_s:g}")
        outcome = _broadcast(outcome, group)
        if outcome is not None:
            return _read(outcome)


def _try(function: Callable[[], Any]) -> _Outcome:
    try:
        value = function()
        pickle.dumps(value)  # here, where its failure reaches all ranks
        return _Outcome(value)
    except ValueError as error:
        return _Outcome(wrong_value=str(error))
    except Exception as error:
        return _Outcome(failed=str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")


def _broadcast(outcome: _Outcome | None, group: dist.ProcessGroup | None) -> _Outcome | None:
    box = [outcome]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def _read(outcome: _Outcome | None) -> Any:
    assert outcome is not None
    if outcome.wrong_value is not None:
        raise ValueError(outcome.wrong_value)
    if outcome.failed is not None:
        raise RunError(outcome.failed)
    return outcome.value
