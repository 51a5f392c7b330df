"""Write the stacks of a rank's threads to a file in the run's folder when `slime-like dump` asks
for them. faulthandler writes them from a signal handler in C, so a rank responds even inside a
collective or a kernel."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

FOLDER = "stacks"  # in the output folder
SIGNAL = signal.SIGUSR2
SETTLED_S = 0.3  # the stacks are complete when the file has not grown for this time


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of a rank."""

    rank: int
    host: str
    process: int
    started: float  # start time from psutil, because process ids are reused

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """Whether the process is running. Only valid on its host."""
        try:
            return abs(psutil.Process(self.process).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class StackFile:
    """The file `rank<N>.txt`: a line of JSON that identifies the process, then the stacks of each
    request. It is removed at the end of the run if there was no request."""

    def __init__(self, output_dir: Path, rank: int) -> None:
        """Create the file and install the signal handler. Raises OSError if it cannot be
        written."""
        self._path = output_dir / FOLDER / f"rank{rank}.txt"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        process = os.getpid()
        started = psutil.Process(process).create_time()
        own = RankProcess(rank, socket.gethostname(), process, started)
        self._path.write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")  # `request_stacks` appends too
        self._size = self._path.stat().st_size
        signal.signal(SIGNAL, signal.SIG_IGN)  # for requests after `close`
        faulthandler.register(SIGNAL, file=self._file, all_threads=True)

    def close(self) -> None:
        faulthandler.unregister(SIGNAL)
        self._file.close()
        with suppress(OSError):
            if self._path.stat().st_size == self._size:
                self._path.unlink()
                self._path.parent.rmdir()  # succeeds on the last rank


def read_rank(path: Path) -> RankProcess | None:
    """Read which process a stack file belongs to; None if it is not a stack file."""
    try:
        with path.open(encoding="utf-8") as file:
            return RankProcess(**json.loads(file.readline()))
    except (OSError, ValueError, TypeError):
        return None


def request_stacks(path: Path, rank: RankProcess, limit_s: float) -> str | None:
    """Ask a process on this host for its stacks and return them; None if it does not respond within
    limit_s, e.g. because it is stopped. path: its stack file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    begin = size = path.stat().st_size
    os.kill(rank.process, SIGNAL)
    asked = changed = time.monotonic()
    while time.monotonic() - asked < limit_s:
        time.sleep(0.05)
        now = path.stat().st_size
        if now != size:
            size = now
            changed = time.monotonic()
        elif size > begin and time.monotonic() - changed > SETTLED_S:
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(begin)
                return file.read()
    return None
