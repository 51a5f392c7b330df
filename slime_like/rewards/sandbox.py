"""Run untrusted Python programs without access to files, network, other processes or the
environment.

A zygote (`sandbox_child.py`) confines itself once (`confinement.py`) and forks a process for each
program. The process ends with its parent or at its deadline, and its output is read up to a limit.
`problem` reports what this host lacks. A sandbox that fails to start raises `SandboxError`, which
is not a result of the program."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
import weakref
from dataclasses import asdict, dataclass
from typing import Literal

from slime_like.rewards import confinement
from slime_like.rewards.sandbox_child import BROKEN, ENDED, HEADER, READY

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slime_like.rewards.sandbox_child import "
    "main; main()"
)
_START_S = 60.0  # seconds until the zygote or a forked program has started, on a loaded machine
_END_S = 10.0  # seconds until a killed program is gone

Status = Literal["ok", "error", "timeout", "output", "killed"]


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a program."""

    wall_s: float = 5.0  # deadline
    cpu_s: int = 5  # CPU time
    memory_mb: int = 512  # address space
    output_bytes: int = 2**20  # of standard output and error together
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """Result of a program."""

    # "ok" (it ended by itself, and the check passed), "error" (exception or nonzero exit),
    # "timeout", "output" (wrote too much), "killed" (by a signal, e.g. for too much CPU time)
    status: Status
    stdout: str
    stderr: str
    seconds: float


def problem() -> str | None:
    """Why programs cannot be run here, or None."""
    return confinement.refusal()


def run(
    program: str, *, stdin: str = "", check: str | None = None, limits: SandboxLimits | None = None
) -> SandboxOutcome:
    """Run `program` as a script; with `check`, run these statements with the program's names, but
    in a process of their own (`sandbox_calls.py`). Both must end without an exception.

    Args:
        program: Python source.
        stdin: Standard input of the program, without a check.
        check: Statements that run after it; None: only the program, which may also end with
            sys.exit(0).
        limits: Resource limits.

    Raises:
        SandboxError: The sandbox could not start, or broke.
    """
    zygote = _idle.pop() if _idle else Zygote()
    try:
        outcome = zygote.run(program, stdin, check, limits or SandboxLimits())
    except BaseException:
        zygote.close()
        raise
    _idle.append(zygote)
    return outcome


def warm_up() -> None:
    """Start a zygote now, for a process that cannot start one later. Raises SandboxError."""
    if not _idle:
        _idle.append(Zygote())


class Zygote:
    """The process from which programs are forked, one at a time.

    Pipes: requests (a frame of JSON, read by the forked child), kills (one byte each), reports (a
    letter, 2 bytes of length and a body: R ready, B broken and why, E ended and its exit status),
    standard output and standard error. E is written after all processes with the output pipes are
    gone, so the remaining output belongs to this program.
    """

    def __init__(self) -> None:
        if reason := confinement.refusal():
            raise SandboxError(reason)
        requests, self._requests = os.pipe()
        kills, self._kills = os.pipe()
        self._reports, reports = os.pipe()
        child_ends = (requests, kills, reports)
        arguments = [confinement.package_root(), str(os.getpid()), json.dumps(child_ends)]
        arguments.append(json.dumps(confinement.missing()))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            pass_fds=child_ends,
        )
        for file in child_ends:
            os.close(file)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._streams = {
            "stdout": self._process.stdout.fileno(),
            "stderr": self._process.stderr.fileno(),
        }
        own_ends = (self._requests, self._kills, self._reports)
        self.close = weakref.finalize(self, _end, self._process, own_ends, os.getpid())
        for file in (self._requests, *self._streams.values()):
            os.set_blocking(file, False)
        self._expect_ready(time.monotonic() + _START_S)

    def run(
        self, program: str, stdin: str, check: str | None, limits: SandboxLimits
    ) -> SandboxOutcome:
        """Like the function `run`."""
        body = {"program": program, "stdin": stdin, "check": check}
        request = json.dumps({**body, "limits": asdict(limits)}).encode()
        start = time.monotonic()
        header = HEADER.pack(len(request), check is not None)
        self._send(header + request, start + _START_S)
        self._expect_ready(start + _START_S)
        streams, status, code = self._follow(limits)
        out, err = (streams[name].decode(errors="replace") for name in ("stdout", "stderr"))
        if status is None and code < 0:
            status = "killed"
        elif status is None:
            status = "ok" if code == 0 else "error"
        return SandboxOutcome(status, out, err, time.monotonic() - start)

    def _send(self, data: bytes, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise SandboxError("the sandbox does not take a program")
                try:
                    data = data[os.write(self._requests, data) :]
                except BrokenPipeError as error:
                    raise SandboxError(f"the sandbox has ended: {self._stderr_tail()}") from error

    def _expect_ready(self, deadline: float) -> None:
        kind, body = self._report(deadline)
        if kind != READY:
            reason = body.decode(errors="replace") if kind == BROKEN else self._stderr_tail()
            raise SandboxError(f"the sandbox cannot start: {reason}")

    def _report(self, deadline: float) -> tuple[bytes, bytes]:
        """The next report; kind b"" if the process has ended. Raises SandboxError at the
        deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise SandboxError("the sandbox does not answer")
        head = os.read(self._reports, 3)
        if len(head) < 3:
            return b"", b""
        (length,) = struct.unpack("<H", head[1:])
        return head[:1], os.read(self._reports, length) if length else b""

    def _follow(self, limits: SandboxLimits) -> tuple[dict[str, bytearray], Status | None, int]:
        """Read both streams until the program ends. Returns a status if it was killed for its time
        or its output."""
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        status: Status | None = None
        deadline = time.monotonic() + limits.wall_s
        with selectors.DefaultSelector() as selector:
            for name, file in self._streams.items():
                selector.register(file, selectors.EVENT_READ, name)
            selector.register(self._reports, selectors.EVENT_READ, "report")
            while True:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                names = {key.data for key, _ in events}
                for name in names & streams.keys():
                    self._take(name, streams[name])
                if "report" in names:
                    break
                too_much = sum(map(len, streams.values())) > limits.output_bytes
                if not too_much and time.monotonic() < deadline:
                    continue
                if status is not None:
                    if time.monotonic() >= deadline:
                        raise SandboxError("a program does not end")
                    continue
                status = "output" if too_much else "timeout"
                os.write(self._kills, b"k")
                deadline = time.monotonic() + _END_S
        kind, body = self._report(time.monotonic() + _END_S)
        if kind != ENDED:
            raise SandboxError(f"the sandbox has ended: {self._stderr_tail()}")
        for name, data in streams.items():
            while self._take(name, data):
                pass
        if status is None and sum(map(len, streams.values())) > limits.output_bytes:
            status = "output"
        return streams, status, struct.unpack("<i", body)[0]

    def _take(self, name: str, data: bytearray) -> int:
        """Read available data; returns the number of bytes."""
        try:
            part = os.read(self._streams[name], 2**16)
        except BlockingIOError:
            return 0
        data += part
        return len(part)

    def _stderr_tail(self) -> str:
        data = bytearray()
        self._take("stderr", data)
        return data.decode(errors="replace").strip()[-300:] or "no output"


def _end(process: subprocess.Popen[bytes], files: tuple[int, ...], owner: int) -> None:
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError):  # a confined worker may do neither; the pipes' end is enough
        process.send_signal(signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    for file in files:
        os.close(file)


_idle: list[Zygote] = []  # append and pop are atomic: threads may run programs at once
