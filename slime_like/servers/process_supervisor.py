"""Run a command, and kill it with all its descendants when the parent process ends for any reason.

    python process_supervisor.py PARENT_PID command word ...

The command runs in a new session; the supervisor exits with its status. Uses only the standard
library, so that it starts in milliseconds and needs little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.25
GRACE_S = 3.0  # between SIGTERM and SIGKILL


def die_with_parent() -> None:
    """In the child before exec: be killed when the supervisor is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def session_processes(session: int) -> list[int]:
    """Live processes of a session. Uses the session because descendants of a server may have left
    its process group."""
    pids = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    state, _, _, owner = file.read().rpartition(")")[2].split()[:4]
                if int(owner) == session and state not in "ZX":
                    pids.append(int(name))
    return pids


def signal_all(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)
    for pid in session_processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(child: subprocess.Popen[bytes]) -> None:
    signal_all(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and (child.poll() is None or session_processes(child.pid)):
        time.sleep(0.05)
    signal_all(child.pid, signal.SIGKILL)
    child.wait()


def main() -> int:
    parent = int(sys.argv[1])
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the trainer, which ends its servers
    child = subprocess.Popen(sys.argv[2:], start_new_session=True, preexec_fn=die_with_parent)
    while child.poll() is None and not stopped and os.getppid() == parent:
        time.sleep(POLL_S)
    end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
