"""A process that grades samples and may be killed at any moment; the other end is `pool.py`.

Frames on both pipes: 8 bytes of length, little-endian, then the body. The parent's frames are pickled, as they come from the
process that started this one and keep the types of metadata; answers are JSON, because what ran here may have evaluated a
model's text. First frame in: `Setup`; first out: ``{"ready": slots}`` or ``{"failed": reason}``. Then jobs and answers:
``{"job": id, ...}`` with ``value`` (number or null) and perhaps ``details``, or ``wrong_type``, ``raised`` or ``timeout``.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import numbers
import os
import pickle
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from slime_like.rewards import remote
from slime_like.rewards.custom import RewardArgs, RewardSample, is_async, load_function
from slime_like.rewards.registry import rewards

HEADER = struct.Struct("<Q")
ASYNC_SLOTS = 64  # samples that an asynchronous function is given at once
BUILTIN_MEMORY = (
    4 * 2**30
)  # bytes of address space: a power tower in an answer must not take the machine's memory
REMOTE = "remote_rm"  # asked for in an event loop, in workers of its own
_PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """args.custom_rm_path is loaded where it is set, else the named rewards are prepared."""

    args: RewardArgs
    rm_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    id: int
    rm_type: str | None  # None: the custom function
    sample: (
        RewardSample | list[RewardSample]
    )  # a list: all samples of a group, for a custom function of groups (--group-rm)


def main() -> None:
    """Serve until the pipe closes. argv: [pid of the parent]."""
    _die_with(int(sys.argv[-1]))
    # A cluster tells every process of a job that its time is up. The trainer finishes its rollout then, and needs the grades; what a reward
    # function starts is not affected, as handlers do not outlive exec.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    requests, replies = _take_pipes()
    setup = _read(requests)
    try:
        function = _prepare(setup)
    except Exception as error:
        _write(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    if function is not None and is_async(function):
        _write(replies, {"ready": ASYNC_SLOTS})
        asyncio.run(_serve_async(requests, replies, function, setup.args))
        return
    _write(replies, {"ready": 1})
    while (job := _read(requests)) is not None:
        _write(replies, {"job": job.id, **_grade(job, function, setup.args)})


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, also in the middle of a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output for the protocol alone; what a reward prints goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _prepare(setup: Setup) -> Callable[..., Any] | None:
    if setup.args.custom_rm_path is not None:
        return load_function(setup.args.custom_rm_path)
    if setup.rm_types == (REMOTE,):
        remote.prepare()
        return remote.score
    for name in setup.rm_types:
        prepare = rewards.get(name).prepare
        if prepare is not None:
            prepare()
    resource.setrlimit(resource.RLIMIT_AS, (BUILTIN_MEMORY, BUILTIN_MEMORY))
    return None


def _read(pipe: BinaryIO) -> Any:
    """The next frame, or None at the end."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = pipe.read(HEADER.unpack(header)[0])
    return pickle.loads(body)


def _write(pipe: BinaryIO, answer: Answer) -> None:
    body = json.dumps(answer).encode()
    pipe.write(HEADER.pack(len(body)) + body)
    pipe.flush()


def _grade(job: Job, function: Callable[..., Any] | None, args: RewardArgs) -> Answer:
    try:
        if job.rm_type is not None:
            sample = job.sample
            assert isinstance(sample, RewardSample)
            value = rewards.get(job.rm_type).score(sample.response, sample.label, sample.metadata)
        else:
            assert function is not None, "a job without an rm_type is for the custom function"
            value = function(args, job.sample)
            if inspect.isawaitable(value):
                value = asyncio.run(_finish(value))
        return answer_to(job, value, args.reward_key)
    except (Exception, SystemExit) as error:
        return raised(error)


async def _finish(awaitable: Any) -> Any:
    return await awaitable


async def _serve_async(
    requests: BinaryIO, replies: BinaryIO, function: Callable[..., Any], args: RewardArgs
) -> None:
    """Every job is a task of its own; each ends at its deadline unless the function blocks the loop, when the parent kills us."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Job | None] = asyncio.Queue()

    def pump() -> None:
        while True:
            job = _read(requests)
            loop.call_soon_threadsafe(queue.put_nowait, job)
            if job is None:
                return

    async def serve(job: Job) -> None:
        try:
            answer = answer_to(
                job,
                await asyncio.wait_for(function(args, job.sample), args.rm_timeout_s),
                args.reward_key,
            )
        except TimeoutError:
            answer = {"timeout": True}
        except (Exception, SystemExit) as error:
            answer = raised(error)
        _write(replies, {"job": job.id, **answer})

    threading.Thread(target=pump, daemon=True).start()
    running: set[asyncio.Task[None]] = set()
    while (job := await queue.get()) is not None:
        task = asyncio.create_task(serve(job))
        running.add(task)
        task.add_done_callback(running.discard)


def answer_to(job: Job, value: Any, reward_key: str | None) -> Answer:
    """As `to_answer`; of a group, one answer for each sample under ``group``."""
    if not isinstance(job.sample, list):
        return to_answer(value, reward_key)
    if isinstance(value, dict | str) or not hasattr(value, "__len__"):
        return {
            "wrong_type": f"{type(value).__name__} for a group of {len(job.sample)} samples, not a list of rewards"
        }
    if len(value) != len(job.sample):
        return {"wrong_type": f"{len(value)} rewards for a group of {len(job.sample)} samples"}
    return {"group": [to_answer(item, reward_key) for item in value]}


def to_answer(value: Any, reward_key: str | None) -> Answer:
    """A reward function's value as an answer; `details` are the other numbers of a dict that holds `reward_key`."""
    details: dict[str, float] = {}
    if isinstance(value, dict):
        if reward_key is None or reward_key not in value:
            return {"wrong_type": f"a dict with the keys {', '.join(map(repr, value)) or '(none)'}"}
        details = {
            str(key): float(item)
            for key, item in value.items()
            if key != reward_key and isinstance(item, numbers.Real)
        }
        value = value[reward_key]
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # numpy and torch scalars
        except (ValueError, RuntimeError):
            return {"wrong_type": f"{type(value).__name__} of more than one element"}
    if value is not None and not isinstance(value, numbers.Real):
        return {"wrong_type": type(value).__name__}
    answer: Answer = {"value": None if value is None else float(value)}
    return {**answer, "details": details} if details else answer


def raised(error: BaseException) -> Answer:
    return {"raised": f"{type(error).__name__}: {error}"[:500]}
