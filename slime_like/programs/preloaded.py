"""Programs of episodes that are forked from one process, so that imports are paid once
(`--agent-preload`). The other end, in the Python of the programs, is `forked.py`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from slime_like.rewards import confinement
from slime_like.text import clean

logger = logging.getLogger(__name__)
FLAG = "--agent-preload"
START_LIMIT_S = 120.0  # of imports
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.programs.forked import serve; "
    "run, name = serve(); del serve; import runpy; "
    "getattr(runpy, run)(name, run_name='__main__', **{'alter_sys': True} if run == 'run_module' "
    "else {})"
)
_ENDED = f"the process of {FLAG} has ended"
_TAKES_A_VALUE = ("-W", "-X")


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A command line of a Python program, taken apart."""

    interpreter: tuple[str, ...]  # with its options
    words: tuple[str, ...]  # a script and its arguments, or -m and those of a module
    environment: Mapping[str, str]  # of env NAME=VALUE


def python_program(command: Sequence[str]) -> PythonProgram:
    """Take a command line apart. Raises ValueError if it is no Python program."""
    rest = list(command)
    environment = {}
    if rest[:1] == ["env"]:
        del rest[0]
        while rest and "=" in rest[0]:
            name, value = rest.pop(0).split("=", 1)
            environment[name] = value
    if not rest or not re.fullmatch(r"python(\d+(\.\d+)?)?", os.path.basename(rest[0])):
        raise ValueError(
            "must be python with a script or -m MODULE, after env NAME=VALUE ... if any"
        )
    interpreter = [rest.pop(0)]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        if rest[0] in ("-", "-c"):
            raise ValueError(f"must be python with a script or -m MODULE, not python {rest[0]}")
        interpreter.append(rest.pop(0))
        if interpreter[-1] in _TAKES_A_VALUE and rest:
            interpreter.append(rest.pop(0))
    if len(rest) < 1 + (rest[:1] == ["-m"]):
        raise ValueError("must name a script or -m MODULE")
    return PythonProgram(tuple(interpreter), tuple(rest), environment)


class Forked:
    """A program that was forked, as `asyncio.subprocess.Process` shows one."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._status: int | None = None

    async def wait(self) -> int:
        """Its exit status. Raises RuntimeError if the process that forked it is gone."""
        if self._status is None:
            line = await self._reader.readline()
            self._writer.close()
            if not line:
                raise RuntimeError(_ENDED)
            self._status = int(line)
        return self._status


class Preloaded:
    """The process that has imported the modules. It starts with the first program, starts again if
    it is lost, and ends with this process.

    Args:
        program: Of the episodes.
        modules: To import.
        environment: In which they are imported; without keys of episodes.
    """

    def __init__(
        self, program: PythonProgram, modules: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._command = [*program.interpreter, "-c", _BOOT, confinement.package_root()]
        self._words = json.dumps(program.words)
        self._modules = modules
        self._environment = {**environment, **program.environment}
        self._own = program.environment
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> socket.socket:
        """The control socket of the running process, started if there is none. Raises
        RuntimeError."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                assert self._control is not None
                return self._control
            if self._process is not None:
                logger.warning(f"the process of {FLAG} is lost, starting another one")
                self.close()
            control, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as output:
                try:
                    self._process = subprocess.Popen(
                        [*self._command, str(theirs.fileno()), self._words, *self._modules],
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                except OSError as error:
                    control.close()
                    raise RuntimeError(f"{self._command[0]}: {error.strerror}") from error
                theirs.close()
                self._control = control
                problem = self._problem(control, output)
            if problem is not None:
                self.close()
                self._process = None
                raise RuntimeError(problem)
            return control

    def _problem(self, control: socket.socket, output: IO[bytes]) -> str | None:
        """Why the process did not start, or None."""
        control.settimeout(START_LIMIT_S)
        try:
            with control.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            return f"imports took longer than {START_LIMIT_S:g} s"
        control.settimeout(None)
        if not line:
            output.seek(0)
            return clean(output.read().decode(errors="replace")[-400:]) or "it ended without a word"
        problem = json.loads(line)["problem"]
        return None if problem is None else clean(problem, 400)

    async def fork(
        self, everyone: str, folder: str, environment: Mapping[str, str], output: int
    ) -> Forked:
        """Start the program of an episode.

        Args:
            everyone, folder: See `apart.separate`.
            environment: Of the program, with the episode's key.
            output: Descriptor of the file that it prints to.

        Raises:
            RuntimeError: The process that forks cannot be started, or is gone.
        """
        control = await asyncio.to_thread(self.start)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                socket.send_fds(control, [b"x"], [theirs.fileno(), output])
            pid = await reader.readline()
            if not pid:
                raise RuntimeError(_ENDED)
        except BaseException as error:
            writer.close()  # ends the fork, which waits for its settings
            if isinstance(error, OSError):
                raise RuntimeError(f"{_ENDED}: {error.strerror}") from error
            raise
        settings = {
            "everyone": everyone,
            "folder": folder,
            "environment": {**environment, **self._own},
        }
        writer.write(json.dumps(settings).encode() + b"\n")
        return Forked(int(pid), reader, writer)

    def close(self) -> None:
        """End it, and the programs with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
