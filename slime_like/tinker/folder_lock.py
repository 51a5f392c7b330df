"""One server to a folder: advisory locks that end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from slime_like.tinker.errors import Failed

WORKERS_LOCK = "workers.lock"  # rank 0 of the workers
API_LOCK = "api.lock"


class FolderLock:
    """An exclusive lock on a file, which says who holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, *, wait_s: float = 0.0) -> None:
        """Lock the file, which is created where it is missing.

        Args:
            wait_s: How long another process may take to release it, in seconds.

        Raises:
            Failed: Another process holds it.
            OSError: The file cannot be created.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                os.close(descriptor)
                raise Failed(
                    f"--server-dir {self.path.parent}: another server uses this folder "
                    f"({holder or 'unknown process'}); stop it, or give another folder"
                ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """For another process; the end of this one does it too."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
