"""Folder lock, so that only one run at a time writes to a folder: a lock file with host, process
and start time, which its owner touches every few seconds.

It also works on network file systems, where `flock` may not: the file is created exclusively
(atomic since NFS 3). Whether an owner on another machine is alive is decided by the modification
time of the file only. Ages are differences between timestamps of the file server, so the clocks of
the machines need not agree. For an owner on this machine the process itself is checked, so the
folder of a killed run is free at once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from slime_like.errors import RunError

logger = logging.getLogger(__name__)

LOCK = "run.lock"
HEARTBEAT_S = 10.0
STALE_S = 60.0  # an owner on another machine counts as dead after this time without a heartbeat
POLL_S = 0.5
MAX_BYTES = 2**16  # maximum size of a lock file
_held: dict[Path, FolderLock] = {}


class FolderInUse(RunError):
    """Another running process writes to the folder."""


class FolderLock:
    """The lock of one folder, from `acquire` to `release`."""

    def __init__(
        self,
        folder: str | Path,
        flag: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        """
        Args:
            folder: Created if missing.
            flag: The flag that names it, for messages.
            heartbeat_s: Seconds between heartbeats.
            stale_s: Seconds without a heartbeat after which an owner on another machine counts as
                dead.
        """
        self.folder = Path(folder)
        self.flag = flag
        self.path = self.folder / LOCK
        self.lost: str | None = None  # reason why the lock was lost
        self._heartbeat_s = heartbeat_s
        self._stale_s = stale_s
        self._owner = {**this_process(), "token": uuid.uuid4().hex}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquire the lock, taking it over from a run that ended without releasing it.

        Waits up to stale_s to find out whether an owner on another machine is alive.

        Raises:
            FolderInUse: The owner is alive.
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self._create():
            lock = self._read()
            if lock is None:  # released in the meantime
                continue
            owner, text = lock
            reason = self._wait_until_dead(owner, text)
            if self._set_aside(text):
                logger.warning(f"{self.flag} {self.folder}: {reason}; its lock is taken over")
        _held[self.folder.resolve()] = self
        self._thread = threading.Thread(target=self._beat, name="folder-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lock. Idempotent; never removes another run's lock."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _held.pop(self.folder.resolve(), None)
        with suppress(OSError):
            if self._is_ours():
                self.path.unlink()

    def confirm(self) -> None:
        """Raise RunError if another run has taken over the lock, e.g. while this one was
        suspended."""
        with suppress(OSError):  # an unreachable file server is reported by the write itself
            if self.lost is None and not self._is_ours():
                self.lost = self._loss_reason()
        if self.lost is not None:
            raise RunError(f"{self.flag} {self.folder}: {self.lost}; this run ends unsaved")

    def _create(self) -> bool:
        """Try to create the lock file for this process; False if it exists."""
        text = json.dumps(self._owner)
        temporary = self._own_path()
        try:
            temporary.write_text(text)
            return self._name_lock(temporary, text)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _name_lock(self, file: Path, text: str) -> bool:
        """Give `file`, which has the text, the name of the lock; False if there is a lock."""
        try:
            os.link(file, self.path)  # atomic, with complete content
        except FileExistsError:
            return False
        except OSError:  # no hard links here: EPERM, EOPNOTSUPP (SMB), ENOSYS (FUSE)
            return _create_exclusively(self.path, text)
        return True

    def _own_path(self) -> Path:
        """A file beside the lock that no other process has."""
        return self.path.with_name(f"{LOCK}.{self._owner['token']}")

    def _unwritable(self, error: OSError) -> OSError:
        return OSError(
            f"{self.flag} {self.folder}: the lock {LOCK} cannot be written ({error.strerror}); "
            "name another folder"
        )

    def _read(self) -> tuple[dict[str, object], str] | None:
        """The owner and the text of the lock file; None if there is no file."""
        text = _read_lock(self.path)
        if text is None:
            return None
        try:
            owner = json.loads(text)
        except (ValueError, RecursionError):
            owner = None
        return (owner if isinstance(owner, dict) else {}), text

    def _wait_until_dead(self, owner: dict[str, object], text: str) -> str:
        """Wait until the owner is known to be dead; returns the reason. Raises FolderInUse as soon
        as there is a sign that it is alive."""
        alive = is_alive(owner)
        if alive is False:
            return f"{_describe(owner)} has ended without releasing it"
        if alive:
            raise self._in_use(owner)
        first, age = _age(self.path)
        if age <= self._stale_s:
            logger.warning(
                f"{self.flag} {self.folder}: locked by {_describe(owner)}; waiting up to "
                f"{self._stale_s - max(age, 0):.0f} s for a sign of life"
            )
        # its time may lie in the future, where the clock of the file server was set back
        started = time.monotonic()
        while age <= self._stale_s and time.monotonic() - started <= self._stale_s:
            time.sleep(min(POLL_S, self._heartbeat_s / 4))
            if _read_lock(self.path) != text:
                return f"{_describe(owner)} has ended"
            modified, age = _age(self.path)
            if modified != first:
                raise self._in_use(owner)
        silent = max(age, time.monotonic() - started)
        return f"{_describe(owner)} has given no sign of life for {silent:.0f} s"

    def _in_use(self, owner: dict[str, object]) -> FolderInUse:
        return FolderInUse(
            f"{self.flag} {self.folder}: in use by {_describe(owner)}; end that run, or name "
            "another folder"
        )

    def _set_aside(self, text: str) -> bool:
        """Remove the lock file of a dead owner; False if another run was faster. Raises OSError if
        the lock of that run cannot be put back."""
        if _read_lock(self.path) != text:
            return False
        aside = self._own_path()
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return False
        taken = _read_lock(aside) or ""
        if taken != text:  # the file of a new owner
            try:
                self._name_lock(aside, taken)
            except OSError as error:
                raise self._unwritable(error) from error
        aside.unlink(missing_ok=True)
        return taken == text

    def _is_ours(self) -> bool:
        lock = self._read()
        return lock is not None and lock[0].get("token") == self._owner["token"]

    def _loss_reason(self) -> str:
        lock = self._read()
        if lock is None:
            return f"its lock {LOCK} was removed during the run"
        return f"taken over by {_describe(lock[0])} while this run gave no sign of life"

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            with suppress(OSError):  # a transient file server error; retried at the next heartbeat
                if not self._is_ours():
                    self.lost = self._loss_reason()
                    return
                os.utime(self.path)


@contextmanager
def hold_folders(folders: Sequence[tuple[str, str | Path]]) -> Iterator[None]:
    """Hold the locks of all folders for the block.

    Args:
        folders: (flag, folder); a folder given twice is locked once.

    Raises:
        FolderInUse: Another run holds one of the locks.
    """
    with ExitStack() as locks:
        for flag, folder in {Path(f).resolve(): (flag, f) for flag, f in folders}.values():
            lock = FolderLock(folder, flag)
            lock.acquire()
            locks.callback(lock.release)
        yield


def confirm_held(folder: str | Path) -> None:
    """Raise RunError if this process has lost the lock of `folder`; no-op if it never held one."""
    lock = _held.get(Path(folder).resolve())
    if lock is not None:
        lock.confirm()


def this_process() -> dict[str, object]:
    """Identity of this process, unique over all machines."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": _machine(),
        "start_ticks": _start_ticks(os.getpid()),
    }


def is_alive(owner: dict[str, object]) -> bool | None:
    """Whether the process is alive; None if it is on another machine or not visible from here.
    owner: from `this_process`."""
    machine = owner.get("machine")
    pid = owner.get("pid")
    if machine is None or machine != _machine() or not isinstance(pid, int):
        return None
    return _start_ticks(pid) == owner.get("start_ticks") is not None


def _machine() -> str | None:
    """Identity of the booted system and its PID namespace; None without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_ticks(pid: int) -> int | None:
    """Start time of a process on this machine, in clock ticks since boot; None if there is none or
    it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _create_exclusively(path: Path, text: str) -> bool:
    """Create a file, empty at first; False if it exists."""
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _read_lock(path: Path) -> str | None:
    """The text of a lock file, None if missing. Raises OSError if it is not a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file; remove it")
        return file.read(MAX_BYTES).decode(errors="replace")


def _age(path: Path) -> tuple[int, float]:
    """(modification time in ns, seconds since then by the clock of the folder's file system)."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        probe.write_text("")
        now = probe.stat().st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # makes NFS ask the server
    except FileNotFoundError:
        return 0, 0.0
    try:
        modified = os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
    return modified, (now - modified) / 1e9


def _describe(owner: dict[str, object]) -> str:
    labels = {"process": "pid", "on": "host", "started": "started"}
    parts = [
        f"{label} {owner[key]!s:.80}" for label, key in labels.items() if owner.get(key) is not None
    ]
    return " ".join(parts).replace("\n", " ") or "an unknown process"
