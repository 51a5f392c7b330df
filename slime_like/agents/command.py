"""Agents that are programs: one process per episode, in its own folder, killed with all its
descendants at the end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import psutil

from slime_like.checkpoints.scratch import scratch_folder
from slime_like.programs.apart import CANNOT_START
from slime_like.programs.environment import environment_without_keys
from slime_like.rewards import confinement, reaper

if TYPE_CHECKING:
    from slime_like.agents.outputs import EpisodeOutputs
    from slime_like.agents.task import Task
    from slime_like.programs.preloaded import Preloaded

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.programs import apart; "
    "apart.main()"
)
# files in the episode's folder
TASK = "task.json"
REWARD = "reward"
METADATA = "metadata.json"  # of a function
MARK = "SLIME_LIKE_EPISODE"  # identifies processes of an episode that left its process group
_MOST_METADATA = 2**26  # bytes
TAIL = 2000  # bytes of output to keep
END_S = 10.0  # seconds for a program and all that it has started to end


class Running(Protocol):
    """A program: `asyncio.subprocess.Process`, or one that was forked."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...


def not_apart() -> str | None:
    """What this host does not enforce between the programs of episodes, or None."""
    reason = confinement.missing().get("namespaces")
    if reason is None:
        return None
    return (
        f"programs of episodes are not separated here (namespaces: {reason}): one can read the "
        "keys and files of the others, and kill them"
    )


async def run_command(
    command: Sequence[str],
    task: Task,
    *,
    apart: bool = True,
    outputs: EpisodeOutputs | None = None,
    preloaded: Preloaded | None = None,
    returns_metadata: bool = False,
) -> float | None:
    """Run the program to its end.

    Args:
        command: The program and its arguments.
        apart: Separate it from the programs of other episodes (`apart.py`), where this host can.
        outputs: Keeps what the program prints, however it ends.
        preloaded: Forks the program, in place of starting the command.
        returns_metadata: It leaves the task's metadata in `metadata.json`.
        task: The task, written to `task.json` in its folder; gateway URL and key are in the
            environment variables that the SDKs read.

    Returns:
        The number in the file `reward`, or None if there is none.

    Raises:
        RuntimeError: The program could not be started, failed, or wrote an invalid reward; with the
            end of its output.
    """
    with (
        tempfile.TemporaryDirectory(dir=_all_episodes(), ignore_cleanup_errors=True) as path,
        tempfile.TemporaryFile() as output,  # not a pipe, which a detached process might keep open
    ):
        folder = Path(path)
        names = ("sample_id", "prompt", "messages", "label", "metadata", "evaluation", "seed")
        row = {name: getattr(task, name) for name in names}
        (folder / TASK).write_text(json.dumps(row, default=str))
        everyone = _all_episodes() if apart and not_apart() is None else ""
        process: Running
        if preloaded is not None:
            process = await preloaded.fork(everyone, path, environment(task), output.fileno())
        else:
            process = await _start([everyone, path, *command], task, output.fileno())
        try:
            status = await process.wait()
        finally:
            await asyncio.shield(_end(process, task.api_key))
            if outputs is not None:
                outputs.write(task, output.fileno())
        if status:
            end = _output_tail(output.fileno())
            if end.startswith(CANNOT_START):
                raise RuntimeError(end.removeprefix("slime_like: "))
            raise RuntimeError(f"exit status {status}: {end}")
        if returns_metadata and (text := _read(folder / METADATA, _MOST_METADATA)) is not None:
            task.metadata.update(json.loads(text))
        return read_reward(folder / REWARD)


async def _start(arguments: Sequence[str], task: Task, output: int) -> asyncio.subprocess.Process:
    """Start a program. arguments: of `apart.main`."""
    start = [sys.executable, "-I", "-S", "-c", _BOOT, confinement.package_root()]
    try:
        return await asyncio.create_subprocess_exec(
            *start,
            *arguments,
            env=environment(task),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeError(f"cannot be started: {error}") from error


async def _end(process: Running, mark: str) -> None:
    """End a program with all that it has started, also where it has killed what ends it."""
    waiting = asyncio.ensure_future(process.wait())
    for number, limit_s in ((reaper.END, END_S), (signal.SIGKILL, 1.0)):
        if not waiting.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
            await asyncio.wait({waiting}, timeout=limit_s)
    waiting.cancel()
    kill_marked(mark)


@functools.cache
def _all_episodes() -> str:
    """The folder that holds those of this process's episodes."""
    folder = scratch_folder("slime_like_agents_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(task: Task) -> dict[str, str]:
    """Environment of the process: gateway URL and the key of this episode."""
    variables = environment_without_keys()
    host = urlsplit(task.url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):  # connect to the gateway directly
        variables[name] = ",".join(filter(None, (variables.get(name), host)))
    return variables | {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.url,
        "ANTHROPIC_API_KEY": task.api_key,
        MARK: task.api_key,
    }


def _output_tail(output: int) -> str:
    """The end of the output. output: file descriptor."""
    start = max(os.fstat(output).st_size - TAIL, 0)
    return os.pread(output, TAIL, start).decode("utf-8", "replace").strip()


def kill_marked(mark: str) -> None:
    """Kill every process that has the mark in its environment."""
    uid = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == uid and process.environ().get(MARK) == mark:
                process.kill()


def read_reward(path: Path) -> float | None:
    """The number in the file, None if the file does not exist. Raises RuntimeError if it is not a
    file with a number."""
    text = _read(path, 100)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise RuntimeError(f"the file {REWARD!r} holds {text!r:.60}, must hold a number") from None


def _read(path: Path, limit: int) -> bytes | None:
    """Up to `limit` bytes of a file that a program has written; None if there is none. Raises
    RuntimeError if it is no regular file."""
    try:
        # do not block on a pipe, or follow a link, that the program created
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RuntimeError(f"the file {path.name!r} cannot be read: {error}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RuntimeError(f"{path.name!r} is no regular file")
        return file.read(limit)
