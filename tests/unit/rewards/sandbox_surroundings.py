"""The targets of the attempts in `sandbox_attempts.py`: a process, files, a port and a System V
segment."""

from __future__ import annotations

import ctypes
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ATTEMPTS = Path(__file__).with_name("sandbox_attempts.py").read_text()


@contextmanager
def surroundings(folder: Path) -> Iterator[str]:
    """They exist meanwhile; yields the lines that name them, in front of `ATTEMPTS`."""
    (folder / "secret").write_text("the secret, of 24 letters")
    (folder / "spare").write_text("x")
    (folder / "empty").mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o1600)
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield f"VICTIM, FOLDER, PORT, SHM = {victim.pid}, {str(folder)!r}, {port}, {segment}\n"
    assert victim.poll() is None, "no attempt ends another process"
    victim.kill()
    victim.wait()
    libc.shmctl(segment, 0, None)


def outcomes(text: str) -> dict[str, str]:
    """Of each attempt, from what the script has printed."""
    found: dict[str, str] = json.loads(text.strip().splitlines()[-1])
    assert len(found) >= 150
    return found
