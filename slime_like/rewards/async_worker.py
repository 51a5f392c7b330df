"""A worker's loop for an asynchronous reward function: several samples wait at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from slime_like.rewards.custom import RewardArgs
from slime_like.rewards.reward_server import OutOfTime
from slime_like.rewards.worker_protocol import (
    GradingJob,
    _read,
    _write,
    answer_to,
    raised,
)


def serve(
    requests: BinaryIO,
    replies: BinaryIO,
    function: Callable[..., Any],
    args: RewardArgs,
    slots: int,
    grace_s: float = 0.0,
) -> None:
    """Report that the worker is ready for `slots` samples, and serve jobs until the pipe closes.
    grace_s: Seconds after its deadline that a function has which keeps the deadline itself."""
    _write(replies, {"ready": slots})
    asyncio.run(_serve(requests, replies, function, args, args.rm_timeout_s + grace_s))


async def _serve(
    requests: BinaryIO,
    replies: BinaryIO,
    function: Callable[..., Any],
    args: RewardArgs,
    timeout_s: float,
) -> None:
    """Run every job as its own task, which ends at its deadline. If the function blocks the event
    loop, the parent kills this process."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[GradingJob | None] = asyncio.Queue()

    def pump() -> None:
        while True:
            job = _read(requests)
            loop.call_soon_threadsafe(queue.put_nowait, job)
            if job is None:
                return

    async def answer(job: GradingJob) -> None:
        try:
            value = await asyncio.wait_for(function(args, job.sample), timeout_s)
            result = answer_to(job, value, args.reward_key)
        except TimeoutError:
            result = {"timeout": True}
        except OutOfTime as error:
            result = {"timeout": True, **raised(error)}
        except (Exception, SystemExit) as error:
            result = raised(error)
        _write(replies, {**result, "job": job.id})

    threading.Thread(target=pump, daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (job := await queue.get()) is not None:
        task = asyncio.create_task(answer(job))
        running.add(task)
        task.add_done_callback(running.discard)
