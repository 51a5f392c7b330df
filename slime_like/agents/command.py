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
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from slime_like.agents.apart import CANNOT_START
from slime_like.checkpoints.scratch import scratch_folder
from slime_like.rewards import confinement

if TYPE_CHECKING:
    from slime_like.agents.outputs import EpisodeOutputs
    from slime_like.agents.task import Task

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.agents.apart import main; main()"
)
# files in the episode's folder
TASK = "task.json"
REWARD = "reward"
MARK = "SLIME_LIKE_EPISODE"  # identifies processes of an episode that left its process group
TAIL = 2000  # bytes of output to keep
# the launcher's variables, which an agent must not mistake for its own
_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_ACCESS_KEY_ID")  # users' secrets
_HIDDEN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL",
)


def not_apart() -> str | None:
    """What this host does not enforce between the programs of episodes, or None."""
    reason = confinement.missing().get("namespaces")
    if reason is None:
        return None
    return (
        f"programs of episodes are not separated here (namespaces: {reason}): one can read the "
        "keys and files of the others, and what it starts in a new session with an empty "
        "environment outlives its episode"
    )


async def run_command(
    command: Sequence[str],
    task: Task,
    *,
    apart: bool = True,
    outputs: EpisodeOutputs | None = None,
) -> float | None:
    """Run the program to its end.

    Args:
        command: The program and its arguments.
        apart: Separate it from the programs of other episodes (`apart.py`), where this host can.
        outputs: Keeps what the program prints, however it ends.
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
        names = ("prompt", "label", "metadata", "evaluation", "seed")
        row = {name: getattr(task, name) for name in names}
        (folder / TASK).write_text(json.dumps(row, default=str))
        if apart and not_apart() is None:
            start = [sys.executable, "-I", "-S", "-c", _BOOT, confinement.package_root()]
            command = [*start, _all_episodes(), path, *command]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=environment(task),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"cannot be started: {error}") from error
        try:
            status = await process.wait()
        finally:
            kill_all(process.pid, task.api_key)
            if outputs is not None:
                outputs.write(task, output.fileno())
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
        if status:
            end = _output_tail(output.fileno())
            if end.startswith(CANNOT_START):
                raise RuntimeError(end.removeprefix("slime_like: "))
            raise RuntimeError(f"exit status {status}: {end}")
        return read_reward(folder / REWARD)


@functools.cache
def _all_episodes() -> str:
    """The folder that holds those of this process's episodes."""
    folder = scratch_folder("slime_like_agents_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(task: Task) -> dict[str, str]:
    """Environment of the process: gateway URL and the key of this episode."""
    variables = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(_HIDDEN) and not k.upper().endswith(_SECRETS)
    }
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


def kill_all(leader: int, mark: str) -> None:
    """Kill the process's session, and every process that has the mark in its environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    uid = os.getuid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real == uid and process.environ().get(MARK) == mark:
                process.kill()


def read_reward(path: Path) -> float | None:
    """The number in the file, None if the file does not exist. Raises RuntimeError if it is not a
    file with a number."""
    try:
        # do not block on a pipe, or follow a link, that the program created
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RuntimeError(f"the file {REWARD!r} cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise RuntimeError(f"{REWARD!r} is no regular file")
        text = os.read(file, 100)
    finally:
        os.close(file)
    try:
        return float(text)
    except ValueError:
        raise RuntimeError(f"the file {REWARD!r} holds {text!r:.60}, must hold a number") from None
