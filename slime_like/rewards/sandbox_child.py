"""The sandboxed side of `sandbox.py`: confines itself once and forks a child for every program.

A fork takes a millisecond, a new interpreter thirty. The child reads its request itself, so that
this process, which later children copy, never sees one. Protocol: see `sandbox.Zygote`."""

from __future__ import annotations

import atexit
import collections  # noqa: F401  # common imports of programs, ready before the fork
import contextlib
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import io
import itertools  # noqa: F401
import json
import math  # noqa: F401
import os
import re  # noqa: F401
import select
import signal
import string  # noqa: F401
import struct
import sys
import threading
import typing  # noqa: F401
from typing import Any, NoReturn

from slime_like.rewards import confinement, sandbox_calls

HEADER = struct.Struct("<Q?")  # length of the request, and whether it has a test
READY = b"R"
ENDED = b"E"
BROKEN = b"B"


class Pipes:
    """File descriptors of this process, created by `sandbox.Zygote`."""

    def __init__(self, requests: int, kills: int, reports: int) -> None:
        self.requests = requests
        self.kills = kills
        self.reports = reports

    def read(self, size: int) -> bytes:
        """Read `size` bytes of the requests, or fewer at their end."""
        data = b""
        while len(data) < size and (part := os.read(self.requests, size - len(data))):
            data += part
        return data

    def report(self, kind: bytes, body: bytes = b"") -> None:
        os.write(self.reports, kind + struct.pack("<H", len(body)) + body)

    def close(self) -> None:
        for file in (self.requests, self.kills, self.reports):
            os.close(file)


def main() -> None:
    """argv: [-c, folder, pid of the parent, pipes, missing layers]. Runs until the request pipe
    closes."""
    pipes = Pipes(*json.loads(sys.argv[3]))
    confinement.assume(json.loads(sys.argv[4]))
    try:
        _confine(int(sys.argv[2]))
    except OSError as error:
        pipes.report(BROKEN, f"{error.strerror} {error.filename or ''}".strip().encode())
        return
    sys.path.remove(confinement.package_root())
    sys.argv = ["program.py"]
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and thereby copy, every page
    pipes.report(READY)
    while len(header := pipes.read(HEADER.size)) == HEADER.size:
        for stream in (0, 1, 2):  # an earlier program may have changed flags of the shared pipes
            os.set_blocking(stream, True)
        size, has_test = HEADER.unpack(header)
        if has_test:
            _watch(pipes, *_fork_both(pipes, size))
        elif (child := os.fork()) == 0:
            _run(_prepare(pipes, size))
        else:
            _watch(pipes, child)


def _confine(parent: int) -> None:
    paths = confinement.readable_paths(packages=False)
    if "namespaces" not in confinement.missing():
        confinement.own_namespaces(paths)
    confinement.lock(paths, seccomp=False)  # the filter is for the children; no program runs here
    confinement.die_with(parent)


def _fork_both(pipes: Pipes, size: int) -> tuple[int, int]:
    """Fork the process of the test, and that of the program, which never sees the request."""
    to_test, from_program = os.pipe()
    to_program, from_test = os.pipe()
    if (test := os.fork()) == 0:
        os.close(from_program)
        os.close(to_program)
        _run_test(_prepare(pipes, size), to_test, from_test)
    if (program := os.fork()) == 0:
        os.close(to_test)
        os.close(from_test)
        _run_program(pipes, to_program, from_program)
    for file in (to_test, from_program, to_program, from_test):
        os.close(file)
    return test, program


def _watch(pipes: Pipes, child: int, *others: int) -> None:
    """Kill the child on request, and report how it ended; then nothing is left of the others."""
    handle = os.pidfd_open(child)
    while handle not in (ready := select.select([pipes.kills, handle], [], [])[0]):
        if ready and os.read(pipes.kills, 1):
            os.kill(child, signal.SIGKILL)
        else:
            os.kill(child, signal.SIGKILL)  # the parent no longer waits for it
            break
    os.close(handle)
    _, status = os.waitpid(child, 0)
    for other in others:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    pipes.report(ENDED, struct.pack("<i", os.waitstatus_to_exitcode(status)))


def _prepare(pipes: Pipes, size: int) -> dict[str, object]:
    """Read the request and drop the remaining rights; a failure is reported and ends the
    process."""
    try:
        request: dict[str, Any] = json.loads(pipes.read(size))
        _own_stdin(request["stdin"])
        _limit(request["limits"])
        pipes.report(READY)
        pipes.close()
    except BaseException as error:
        pipes.report(BROKEN, f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(1)
    return request


def _limit(limits: dict[str, int]) -> None:
    """Drop the remaining rights. Raises OSError."""
    confinement.die_with(os.getppid())
    confinement.limit(
        memory=limits["memory_mb"] * 2**20,
        open_files=limits["open_files"],
        cpu_s=limits["cpu_s"],
    )
    confinement.lock_child()


def _own_stdin(text: str) -> None:
    """Provide standard input as a memory file, so that every way of reading it works."""
    file = os.memfd_create("stdin")
    os.write(file, text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")


def _run(request: dict[str, Any]) -> NoReturn:
    """Run the program; exits like an interpreter."""
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    code = 0
    try:
        exec(compile(request["program"], "program.py", "exec"), names)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins, as at the end of an interpreter
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code)


def _run_test(request: dict[str, Any], reader: int, writer: int) -> NoReturn:
    """Run the test of a program in another process; exits with 0 if it has passed."""
    channel = sandbox_calls.Channel(reader, writer)
    try:
        channel.send({"program": request["program"], "limits": request["limits"]})
        sandbox_calls.run_test(request["check"], reader, writer)
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _run_program(pipes: Pipes, reader: int, writer: int) -> NoReturn:
    """Run the program that the process of its test sends, and answer its calls."""
    try:
        pipes.close()
        request = sandbox_calls.Channel(reader, writer).receive()
        _own_stdin("")
        _limit(request["limits"])
        sandbox_calls.serve(request["program"], reader, writer)
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    os._exit(1)
