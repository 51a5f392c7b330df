"""Ends all processes that a user's reward function has started, including daemons, when its worker
or the run ends.

The process that the pool starts becomes the reaper and forks the worker. Descendants that lose
their parents become the reaper's children (PR_SET_CHILD_SUBREAPER), so none escapes by a double
fork or a new session. On systems other than Linux only the process group is ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
END = signal.SIGRTMIN + 5 if sys.platform == "linux" else signal.SIGTERM  # ends a reaper
SIGNALLED = 128  # exit codes above are signals
WATCH_S = 1.0  # how often a parent is looked for that may end


def split(*, with_thread: bool = True) -> None:
    """Fork a worker and return in it; the calling process becomes its reaper. Must be called before
    starting threads.

    Args:
        with_thread: The reaper ends with the thread that started it, at once; False: with the
            process of that thread, within `WATCH_S`.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    signal.pthread_sigmask(signal.SIG_BLOCK, {END, signal.SIGCHLD})
    parent = os.getppid()
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {END, signal.SIGCHLD})
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != reaper:
            os._exit(0)
        return
    if with_thread:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(END))
    _keep(worker, parent)


def _keep(worker: int, parent: int) -> NoReturn:
    """Wait until the worker or the parent ends or END arrives, kill remaining descendants, and exit
    with the worker's status."""
    for file in (0, 1):  # the worker's pipes
        os.close(file)
    os.closerange(3, 256)
    code: int | None = None
    while code is None:
        received = signal.sigtimedwait({END, signal.SIGCHLD}, WATCH_S)
        ends = os.getppid() != parent or (received is not None and received.si_signo == END)
        code = _reap().get(worker, SIGNALLED + signal.SIGKILL if ends else None)
    end = time.monotonic() + 5.0
    while _children() and time.monotonic() < end:
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.002)
    os._exit(code)


def _reap() -> dict[int, int]:
    """Exit codes of ended children, by process id."""
    ended = {}
    with suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(pair[1])
            ended[pair[0]] = SIGNALLED - code if code < 0 else code
    return ended


def _children() -> list[int]:
    """All descendants of this process; they become its children when their parents die."""
    pid = os.getpid()
    with suppress(OSError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []
