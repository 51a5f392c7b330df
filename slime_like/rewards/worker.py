"""A process that grades samples and may be killed at any time; the other end is `pool.py`.

Frames on both pipes: 8 bytes of length, little-endian, then the body. The parent's frames are
pickled: they are trusted, and keep the types of metadata. Answers are JSON, because this process
may have evaluated a model's text. The first frame in is `Setup`; the first out is ``{"ready":
slots}`` or ``{"failed": reason}``. Then come `GradingJob`s, and for each an `Answer`.

Built-in rewards confine the process before the first job (`confinement.py`). A user's function is
trusted and not confined; what it starts ends with it (`reaper.py`).
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from slime_like.import_utils import load_module
from slime_like.rewards import confinement, evaluation
from slime_like.rewards import reaper as reaper
from slime_like.rewards.custom import RewardArgs, is_async, load_function
from slime_like.rewards.registry import Reward, rewards
from slime_like.rewards.sandbox import SandboxError
from slime_like.rewards.worker_protocol import (
    ASYNC_SLOTS,
    Answer,
    GradingJob,
    Text,
    _read,
    _reason,
    _write,
    answer_to,
    raised,
    to_answer,
)

# bytes of address space: a power tower in an answer must not take the machine's memory
BUILTIN_MEMORY = 4 * 2**30
CLIENT_GRACE_S = 0.5  # less than pool.GRACE_S, after which the worker is killed
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker prepares: args.custom_rm_path if set, otherwise the named rewards."""

    args: RewardArgs
    rm_types: tuple[str, ...]
    # result of `confinement.missing` in the process that starts the workers
    missing: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # user modules that define some of the named rewards
    served: bool = False  # the only named reward is that of a server
    slots: int = ASYNC_SLOTS  # concurrent samples of a server or an asynchronous function
    variables: tuple[str, ...] = ()  # environment variables that the reward needs

    @property
    def confined(self) -> bool:
        """Whether the workers only run built-in code on texts; a reward server needs the
        network."""
        return self.args.custom_rm_path is None and not self.served


def main() -> None:
    """Serve until the pipe closes. argv: [pid of the parent]."""
    _die_with(int(sys.argv[-1]))
    # A cluster sends its termination signal to every process of a job. The trainer still finishes
    # its rollout and needs the grades, so workers ignore it; processes started by a reward function
    # are not affected, because signal handlers are reset on exec.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    requests, replies = _take_pipes()
    setup: Setup = _read(requests)
    confinement.assume(setup.missing)
    # some tasks import it, and it logs long warnings about its missing cache folder
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if setup.args.custom_rm_path is not None:
        reaper.split()
    try:
        function = _prepare(setup)
    except BaseException as error:
        _write(replies, {"failed": _reason(error)})
        return
    if function is not None and is_async(function):
        from slime_like.rewards.async_worker import serve

        # a client of a server ends in time by itself, and says which server was late
        grace_s = CLIENT_GRACE_S if setup.served else 0.0
        serve(requests, replies, function, setup.args, setup.slots, grace_s)
        return
    _write(replies, {"ready": 1})
    while (job := _read(requests)) is not None:
        try:
            answer = _grade(job, function, setup.args)
        except SandboxError as error:  # the sandbox cannot be restarted in here
            _write(replies, {**raised(error), "job": job.id, "last": True})
            return
        _write(replies, {**answer, "job": job.id})


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent dies, even inside a blocking call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Reserve standard input and output for the protocol; output of rewards goes to standard
    error."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _prepare(setup: Setup) -> Callable[..., object] | None:
    if setup.args.custom_rm_path is not None:
        return load_function(setup.args.custom_rm_path)
    if setup.served:
        connect = rewards.get(setup.rm_types[0]).connect
        assert connect is not None, "a served reward has a client"
        return connect(setup.args).score
    for module in setup.modules:
        load_module(module, "--import-modules")
    _confine(setup.rm_types)
    return None


def _confine(names: tuple[str, ...]) -> None:
    """Import what the rewards need, and drop this process's rights. Raises OSError,
    RuntimeError."""
    if "code" in names:  # its sandbox must start before rights are dropped
        rewards.get("code").prepare()  # type: ignore[misc]
    parent = os.getppid()
    paths = confinement.readable_paths(packages=True)
    linux = sys.platform == "linux"
    if linux and "namespaces" not in confinement.missing():
        confinement.own_namespaces(paths)
    for name in names:
        prepare = rewards.get(name).prepare
        if prepare is not None and name != "code":
            prepare()
    resource.setrlimit(resource.RLIMIT_AS, (BUILTIN_MEMORY, BUILTIN_MEMORY))
    if linux:
        confinement.limit(memory=BUILTIN_MEMORY)
        confinement.die_with(parent)
        confinement.lock(paths)


def _grade(job: GradingJob, function: Callable[..., Any] | None, args: RewardArgs) -> Answer:
    if job.rm_type is not None:
        reward = rewards.get(job.rm_type)
        if len(job.texts) == 1:
            return _score(reward, job.texts[0])
        values = _plain_values(reward, job.texts)
        if values is None:
            return {"batch": [_score(reward, text) for text in job.texts]}
        return {"values": values}
    assert function is not None, "a job without an rm_type is for the custom function"
    try:
        value = function(args, job.sample)
        if inspect.isawaitable(value):
            import asyncio

            value = asyncio.run(_finish(value))
        return answer_to(job, value, args.reward_key)
    except (Exception, SystemExit) as error:
        return raised(error)


def _plain_values(reward: Reward, texts: list[Text]) -> list[float] | None:
    """Scores of several texts under a bounded reward, in a compact form. None if a score raises or
    is not a number."""
    try:
        values = [reward.score(*text) for text in texts]
    except (Exception, SystemExit):
        return None
    return values if all(type(value) is float for value in values) else None


def _score(reward: Reward, text: Text) -> Answer:
    """Score one text with a built-in reward. Raises SandboxError."""
    if not reward.evaluates:
        return _call(reward, text)
    answer = evaluation.watched(lambda: _call(reward, text))
    return {"refused": "it would run code"} if answer is None else answer


def _call(reward: Reward, text: Text) -> Answer:
    try:
        return to_answer(reward.score(*text), None)
    except SandboxError:
        raise
    except (Exception, SystemExit) as error:
        return raised(error)


async def _finish(awaitable: Any) -> Any:
    return await awaitable
