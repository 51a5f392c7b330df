"""A sandboxed shell with files, for coding agents.

Each command runs in its own sandbox: namespaces for users, processes, network, IPC and files, with
read-only system programs and libraries and the files of the `Workspace` in memory; Landlock and a
seccomp filter (`confinement.lock_shell`); resource limits. When the command ends, everything that
it started is killed, and the files are kept as a tar archive that only the next sandbox unpacks.

A command has an outcome, whatever it does to its sandbox: `SandboxError` is for one that does not
start. This needs the namespaces and the filter of `confinement.py`; `problem` reports what is
missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import psutil

from slime_like.rewards import confinement
from slime_like.rewards.sandbox import SandboxError
from slime_like.rewards.shell_child import HEADER, MAX_DEPTH, READY

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.rewards.shell_child import main; "
    "main()"
)
_START_S = 60.0  # seconds in addition to the deadline for starting the sandbox on a loaded machine
_NEEDED = ("namespaces", "seccomp")
_LOOK_S = 0.1  # seconds between two looks at the memory of a command

Status = Literal["ok", "timeout", "files", "memory", "broken"]
_KILLED = 137  # exit status of a command whose sandbox was killed


@dataclass(frozen=True, slots=True)
class ShellLimits:
    """Limits of commands."""

    wall_s: float = 30.0  # deadline of a command
    cpu_s: int = 30  # CPU time per process
    memory_mb: int = 512  # address space per process
    # resident memory of all processes of a command, of which those that run for less than a tenth
    # of a second may take more
    total_memory_mb: int = 1024
    files_mb: int = 16  # of all files
    # amount of a command's output that is kept, from its start and its end
    output_bytes: int = 8192
    open_files: int = 128
    processes: int = 16  # number at a time


@dataclass(frozen=True, slots=True)
class ShellOutcome:
    """Result of a command."""

    # "ok" (the command ended), "timeout"; or, with all changes of the command dropped, "files" (too
    # large, or nested too deeply), "memory" (too much), "broken" (it ended or spoiled its sandbox)
    status: Status
    exit_status: int  # as in a shell; 124 after a timeout
    output: str  # standard output and error


def problem() -> str | None:
    """Why no shell can be confined on this host, or None."""
    out = confinement.missing()
    lacking = [f"{name}: {out[name]}" for name in _NEEDED if name in out]
    return f"the shell's sandbox cannot be set up here: {'; '.join(lacking)}" if lacking else None


class Workspace:
    """The files of one episode, and commands that run on them, one at a time."""

    def __init__(self, limits: ShellLimits | None = None) -> None:
        """Raises SandboxError if no shell can be confined."""
        if reason := problem():
            raise SandboxError(reason)
        self.limits = limits or ShellLimits()
        self._archive = b""

    def run(self, command: str, files: Mapping[str, str] | None = None) -> ShellOutcome:
        """Run a command of /bin/sh in the folder of the files. `python` is this interpreter,
        without installed packages.

        Args:
            command: Argument of ``sh -c``.
            files: Written before the command, by path in the folder. Text that is not valid UTF-8
                is replaced.

        Raises:
            SandboxError: The sandbox could not start; the files are unchanged.
            ValueError: A path leads out of the folder.
        """
        for path in files or ():
            if not _is_path(path):
                raise ValueError(f"{path!r:.100} is no path in the workspace")
        if not _is_text(command):
            return ShellOutcome("ok", 2, "sh: the command has a NUL or a surrogate character\n")
        request = {
            "command": command,
            "files": dict(files or {}),
            "limits": asdict(self.limits),
            "python": os.path.realpath(sys.executable),
        }
        body = json.dumps(request).encode()
        header = HEADER.pack(len(body), len(self._archive))
        outcome, archive = _run_sandbox(header + body + self._archive, self.limits)
        if archive is not None:
            self._archive = archive
        return outcome

    def write(self, path: str, text: str) -> None:
        """Write a file, creating parent folders. Raises like `run`, and ValueError if it cannot be
        written."""
        outcome = self.run("true", {path: text})
        if outcome.exit_status:
            raise ValueError(outcome.output)

    def read(self, path: str) -> str | None:
        """The beginning of a file; None if it cannot be read."""
        outcome = self.run(f"cat -- {shlex.quote(path)}")
        return outcome.output if outcome.exit_status == 0 else None


def _is_path(path: str) -> bool:
    """Whether this is a relative path that stays in its folder and can be written to an archive."""
    parts = path.split("/")
    return (
        bool(path)
        and _is_text(path)
        and not os.path.isabs(path)
        and ".." not in parts
        and len(parts) <= MAX_DEPTH
    )


def _is_text(text: str) -> bool:
    """Whether a program can get the text as an argument: no NUL, and no surrogate."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _run_sandbox(request: bytes, limits: ShellLimits) -> tuple[ShellOutcome, bytes | None]:
    """The outcome, and the files after the command; None if they are those before it. Raises
    SandboxError if the sandbox does not start."""
    arguments = [confinement.package_root(), str(os.getpid()), json.dumps(confinement.missing())]
    with tempfile.TemporaryFile() as file:  # not a pipe, to which _follow would have to write
        file.write(request)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, *arguments],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
    try:
        memory, answer, errors = _follow(process, limits)
    finally:
        process.kill()  # this also ends its PID namespace
        process.wait()
    if not answer.startswith(READY):
        reason = errors.decode(errors="replace").strip()[-500:] or "no output"
        raise SandboxError(f"the shell's sandbox cannot start: {reason}")
    if memory > limits.total_memory_mb:
        text = f"the command took more than {limits.total_memory_mb} MB of memory\n"
        return ShellOutcome("memory", _KILLED, text), None
    return _parse(answer.removeprefix(READY))


def _follow(process: subprocess.Popen[bytes], limits: ShellLimits) -> tuple[float, bytes, bytes]:
    """Wait until the sandbox ends by itself, or end it where it takes too much memory or time.
    Returns the most memory that was seen in MB, its answer, and its standard error."""
    deadline = time.monotonic() + limits.wall_s + _START_S
    most = 0.0
    while time.monotonic() < deadline and most <= limits.total_memory_mb:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return (most, *process.communicate(timeout=_LOOK_S))
        most = max(most, _resident(process.pid) / 2**20)
    process.kill()
    return (most, *process.communicate())


def _resident(pid: int) -> int:
    """Bytes of memory of a process and its descendants."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _parse(answer: bytes) -> tuple[ShellOutcome, bytes | None]:
    """The command's result and the archive."""
    sizes = HEADER.unpack_from(answer) if len(answer) >= HEADER.size else (0, 0)
    if not sizes[0] or len(answer) != HEADER.size + sum(sizes):
        text = "the command ended its sandbox; the files are as before\n"
        return ShellOutcome("broken", _KILLED, text), None
    end = HEADER.size + sizes[0]
    outcome = ShellOutcome(**json.loads(answer[HEADER.size : end]))
    return outcome, None if outcome.status == "files" else answer[end:]
