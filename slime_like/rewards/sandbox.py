"""Runs a program that nobody trusts: one Python process, killed at its deadline, without files, network, children or environment.

The kernel refuses what the program may not do, in layers that all have to be there (`sandbox_child.py` sets them up before the first line of
the program):

- Landlock (Linux 5.13): no file can be read but the Python installation and the system's libraries, and none can be written.
- A seccomp filter: no sockets, no new processes, no exec, no signals to others, no namespaces, no tracing.
- Resource limits: address space, processor time, size of files, open files, core dumps.
- Where unprivileged namespaces are allowed, also a network namespace of its own, with nothing in it. Elsewhere the filter stands alone.

The program gets an empty environment and a session of its own, whose whole process group is killed at the deadline; it dies with its parent
too. Its output is read up to a limit. There is no fallback without the first three: `problem` tells what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import secrets
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_S = (
    5.0  # for the interpreter to be there, on a loaded machine; the deadline counts from then on
)

Status = Literal["ok", "error", "timeout", "output", "killed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """wall_s: deadline. cpu_s: processor time. memory_mb: address space. output_bytes: of standard output and error together."""

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mb: int = 512
    output_bytes: int = 2**20
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: "ok" (ended by itself, and the check after it passed), "error" (raised, or exited otherwise), "timeout", "output" (wrote too
    much), "killed" (by a signal, as one that uses too much processor time is)."""

    status: Status
    stdout: str
    stderr: str
    seconds: float


@functools.cache
def problem() -> str | None:
    """Why programs cannot be run here, or None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"the sandbox needs Linux on x86_64 or aarch64, and this is {sys.platform} on {platform.machine()}"
    outcome = run("print('ready')")
    if outcome.status == "ok" and outcome.stdout == "ready\n":
        return None
    return f"the sandbox cannot be set up here ({outcome.status}): {outcome.stderr.strip()[-300:]}"


def run(
    program: str, *, stdin: str = "", check: str | None = None, limits: Limits | None = None
) -> Outcome:
    """Run `program` as a script, then `check` in the same names; both must end without an exception. check None: the program alone, which may
    also leave by sys.exit(0)."""
    limits = limits or Limits()
    proof = secrets.token_hex(16)
    request = {
        "program": program,
        "stdin": stdin,
        "check": check,
        "proof": proof,
        "limits": asdict(limits),
        "parent": os.getpid(),
    }
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        streams, status = _exchange(process, json.dumps(request).encode(), limits)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
    out, err = (streams[name].decode(errors="replace") for name in ("stdout", "stderr"))
    if status is None:
        proven = out.endswith(proof)
        out = out.removesuffix(proof)
        status = (
            "killed" if code < 0 else "ok" if code == 0 and (proven or check is None) else "error"
        )
    return Outcome(status, out, err, time.monotonic() - start)


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, limits: Limits
) -> tuple[dict[str, bytearray], Status | None]:
    """Send the request and read both streams to their ends. A status where the program has to be killed: too long, or too much written."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    deadline = time.monotonic() + limits.wall_s + _START_S
    started = False
    with selectors.DefaultSelector() as selector:
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            selector.register(pipe, selectors.EVENT_READ, name)
        selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        os.set_blocking(process.stdin.fileno(), False)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.data == "stdin":
                    with contextlib.suppress(BrokenPipeError):
                        request = request[os.write(key.fd, request) :]
                        if request:
                            continue
                    selector.unregister(process.stdin)
                    process.stdin.close()
                    continue
                data = os.read(key.fd, 2**16)
                if not data:
                    selector.unregister(key.fileobj)
                if (
                    key.data == "stderr" and not started and data.startswith(b"\0")
                ):  # the child is ready
                    started, data, deadline = True, data[1:], time.monotonic() + limits.wall_s
                streams[key.data] += data
                if sum(map(len, streams.values())) > limits.output_bytes:
                    return streams, "output"
            if time.monotonic() >= deadline:
                return streams, "timeout"
    # both streams are closed, which a program may do and live on
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
        return streams, None
    return streams, "timeout"
