"""A sandboxed shell with files, for coding agents.

Each command runs in its own sandbox: namespaces for users, processes, network, IPC and files, with
read-only system programs and libraries and the files of the `Workspace` in memory; Landlock and a
seccomp filter (`confinement.lock_shell`); resource limits. When the command ends, everything that
it started is killed, and the files are kept as a tar archive that only the next sandbox unpacks.

This needs the namespaces and the filter of `confinement.py`; `problem` reports what is missing.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from slime_like.rewards import confinement
from slime_like.rewards.sandbox import SandboxError
from slime_like.rewards.shell_child import HEADER

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.rewards.shell_child import main; "
    "main()"
)
_START_S = 60.0  # seconds in addition to the deadline for starting the sandbox on a loaded machine
_NEEDED = ("namespaces", "seccomp")

Status = Literal["ok", "timeout", "files"]


@dataclass(frozen=True, slots=True)
class ShellLimits:
    """Limits of commands."""

    wall_s: float = 30.0  # deadline of a command
    cpu_s: int = 30  # CPU time per process
    memory_mb: int = 512  # address space per process
    files_mb: int = 16  # of all files
    # amount of a command's output that is kept, from its start and its end
    output_bytes: int = 8192
    open_files: int = 128
    processes: int = 16  # number at a time


@dataclass(frozen=True, slots=True)
class ShellOutcome:
    """Result of a command."""

    # "ok" (the command ended), "timeout", "files" (over their size limit; all changes of the
    # command are dropped)
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
            SandboxError: The sandbox could not start, or broke; the files are unchanged.
            ValueError: A path leads out of the folder.
        """
        for path in files or ():
            if not path or os.path.isabs(path) or ".." in path.split("/") or "\0" in path:
                raise ValueError(f"{path!r:.100} is no path in the workspace")
        request = {
            "command": command,
            "files": dict(files or {}),
            "limits": asdict(self.limits),
            "python": os.path.realpath(sys.executable),
        }
        body = json.dumps(request).encode()
        header = HEADER.pack(len(body), len(self._archive))
        outcome, archive = _parse(_run_sandbox(header + body + self._archive, self.limits))
        if outcome.status != "files":
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


def _run_sandbox(request: bytes, limits: ShellLimits) -> bytes:
    arguments = [confinement.package_root(), str(os.getpid()), json.dumps(confinement.missing())]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        answer, errors = process.communicate(request, timeout=limits.wall_s + _START_S)
    except subprocess.TimeoutExpired:
        raise SandboxError("the shell's sandbox does not answer") from None
    finally:
        process.kill()  # this also ends its PID namespace
        process.wait()
    if process.returncode:
        reason = errors.decode(errors="replace").strip()[-500:] or "no output"
        raise SandboxError(f"the shell's sandbox cannot start: {reason}")
    return answer


def _parse(answer: bytes) -> tuple[ShellOutcome, bytes]:
    """The command's result and the archive. Raises SandboxError for invalid data."""
    if len(answer) < HEADER.size:
        raise SandboxError("the shell's sandbox has ended without an answer")
    size, archive_size = HEADER.unpack_from(answer)
    if len(answer) != HEADER.size + size + archive_size:
        raise SandboxError("the answer of the shell's sandbox is incomplete")
    outcome = ShellOutcome(**json.loads(answer[HEADER.size : HEADER.size + size]))
    return outcome, answer[HEADER.size + size :]
