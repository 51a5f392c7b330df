"""Durable files: written, hashed on the fly, synced, renamed. Every write of a checkpoint uses
this."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

READ_BYTES = 4 * 2**20  # at a time, while a file is hashed
HASHED_BESIDE = 2**20  # pieces from this size on
MAX_JSON_BYTES = 2**28  # of one file: an index of a million tensors has half of it


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be. size: bytes. sha256: in hexadecimal digits."""

    size: int
    sha256: str


class HashedFile:
    """A file being written front to back, with the SHA-256 of what went into it. Large pieces are
    hashed while they are written: both release the interpreter's lock."""

    def __init__(self, file: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._file = file
        self._hasher = hasher
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        hashing = None
        if len(view) < HASHED_BESIDE:
            self._hash.update(view)
        else:
            hashing = self._hasher.submit(self._hash.update, view)
        written = 0
        while written < len(view):  # an unbuffered file may take less than it is given
            written += self._file.write(view[written:]) or 0
        if hashing is not None:
            hashing.result()
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """Write `path`; it is synced when the block ends without an error."""
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        yield HashedFile(file, hasher)
        os.fsync(file.fileno())


def write_file(path: Path, text: str | bytes) -> FileRecord:
    with hashed_file(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)
    return file.record()


@contextmanager
def writes_to(flag: str, path: str | Path) -> Iterator[None]:
    """Have an OSError of the block, as of a full disk, say what was written and which option chose
    the place."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{flag} {path}: cannot be written: {error.strerror or error}; make room there, or name another place"
        ) from error


def replace_file(path: Path, text: str) -> None:
    """Readers, and a process that starts after a crash, see the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write_file(temporary, text)
    os.replace(temporary, path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, inside: Path | None = None) -> BinaryIO:
    """Open a file of a folder that somebody else may have written.

    Args:
        path: to be read.
        inside: the folder that the file must lie in, once all symbolic links are followed.

    Returns:
        An unbuffered file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is no regular file (a FIFO or a device would block, or never end), or lies
        elsewhere.
    """
    try:
        leaves = inside is not None and not path.resolve().is_relative_to(inside.resolve())
    except RuntimeError as error:  # Python before 3.13
        raise OSError(f"{path} is a loop of links") from error
    if leaves:
        raise OSError(f"{path} is a link that leaves {inside}")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_json(path: Path, inside: Path | None = None) -> Any:
    """What a JSON file holds; arguments as of `open_regular`.

    Raises:
        ValueError: it is damaged, nested too deeply, or larger than MAX_JSON_BYTES. The text lacks
        the name. OSError: as `open_regular`.
    """
    with open_regular(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes are too many for such a file")
        content = file.read(size) if size else b""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def size_inside(path: Path, inside: Path) -> int:
    """Bytes of a regular file that lies in `inside`; raises as `open_regular`."""
    with open_regular(path, inside) as file:
        return os.fstat(file.fileno()).st_size


def hash_file(path: Path, inside: Path | None = None) -> FileRecord:
    """Raises as `open_regular`."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path, inside) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def remove_folder(path: Path) -> None:
    """Remove a folder that may be gone already."""
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
