"""Supervision of background tasks that are not awaited: a task that ends is reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)


def supervised(
    name: str, coroutine: Coroutine[object, object, object], on_fault: Callable[[str], None]
) -> asyncio.Task[object]:
    """Start a task that should run until it is cancelled.

    Args:
        name: Its purpose, for the message.
        on_fault: Called with a message if it returns or raises.
    """
    task = asyncio.create_task(coroutine, name=name)

    def ended(done: asyncio.Task[object]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.error("%s", name, exc_info=error)
        why = "it returned" if error is None else f"{type(error).__name__}: {error}"
        on_fault(f"the {name} has ended ({why})")

    task.add_done_callback(ended)
    return task
