"""Durable file writes for checkpoints: hash on the fly, sync, rename; and safe reads of files that
others may have written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

READ_BYTES = 4 * 2**20  # block size for hashing a file
MIN_ASYNC_BYTES = 2**20  # pieces of at least this size are hashed in a thread
MARKER = ".done.json"
MAX_JSON_BYTES = 2**28  # twice the size of an index of a million tensors


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Expected content of a file."""

    size: int  # bytes
    sha256: str  # hexadecimal digest


class HashedFile:
    """A file that is written sequentially, with the SHA-256 of its content. Large pieces are hashed
    while they are written, since both release the GIL."""

    def __init__(self, file: BinaryIO, hasher: ThreadPoolExecutor) -> None:
        self._file = file
        self._hasher = hasher
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        hashing = None
        if len(view) < MIN_ASYNC_BYTES:
            self._hash.update(view)
        else:
            hashing = self._hasher.submit(self._hash.update, view)
        written = 0
        while written < len(view):  # writes to an unbuffered file may be partial
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
    """Open `path` for writing; synced to disk if the block ends without an error."""
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        yield HashedFile(file, hasher)
        os.fsync(file.fileno())


def write_file(path: Path, text: str | bytes) -> FileRecord:
    with hashed_file(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)
    return file.record()


@contextmanager
def writes_to(flag: str, path: str | Path) -> Iterator[None]:
    """Add flag and path to the message of an OSError raised in the block, e.g. for a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{flag} {path}: cannot be written: {error.strerror or error}; make room there, or "
            "name another place"
        ) from error


def replace_file(path: Path, text: str) -> None:
    """Replace the file atomically: readers see the old text or the new one, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    write_file(temporary, text)
    os.replace(temporary, path)
    sync_path(path.parent)


def mark_complete(path: Path, record: FileRecord, identity: str, **more: object) -> None:
    """Write a marker next to a file of a long write, so that the next attempt can keep the file.

    Args:
        identity: Of everything that determines the file's content.
        more: Plain JSON.
    """
    marker = {"identity": identity, **asdict(record), **more}
    replace_file(path.with_name(path.name + MARKER), json.dumps(marker))


def complete_file(path: Path, identity: str) -> dict[str, Any] | None:
    """The marker of a file that is complete, by its SHA-256, and has this identity."""
    try:
        marker: dict[str, Any] = json.loads(path.with_name(path.name + MARKER).read_text())
        record = FileRecord(marker["size"], marker["sha256"])
        return marker if marker["identity"] == identity and hash_file(path) == record else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, inside: Path | None = None) -> BinaryIO:
    """Open a file in a folder that someone else may have written.

    Args:
        path: File to read.
        inside: Folder that must contain the file after resolving symbolic links.

    Returns:
        An unbuffered file.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: It is not a regular file (a FIFO or a device could block or never end), or it is
            not in the folder.
    """
    try:
        outside = inside is not None and not path.resolve().is_relative_to(inside.resolve())
    except RuntimeError as error:  # Python before 3.13
        raise OSError(f"{path} is a loop of links") from error
    if outside:
        raise OSError(f"{path} is a link out of {inside}")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_json(path: Path, inside: Path | None = None, limit: int | None = MAX_JSON_BYTES) -> Any:
    """Read a JSON file.

    Args:
        path, inside: As for `open_regular`.
        limit: Maximum size in bytes; None: any, for files whose size is known to be right.

    Raises:
        ValueError: It is damaged, nested too deeply, or larger than `limit`. The message does not
            name the file.
        OSError: As for `open_regular`.
    """
    with open_regular(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise ValueError(f"{size} bytes are too many for such a file")
        content = bytearray()
        while block := file.read(size - len(content)):  # one read gives 2 GiB at most
            content += block
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def size_inside(path: Path, inside: Path) -> int:
    """Size in bytes of a regular file in `inside`; raises as `open_regular`."""
    with open_regular(path, inside) as file:
        return os.fstat(file.fileno()).st_size


def hash_file(path: Path, inside: Path | None = None) -> FileRecord:
    """Size and SHA-256 of a file; raises as `open_regular`."""
    digest = hashlib.sha256()
    size = 0
    with open_regular(path, inside) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def remove_folder(path: Path) -> None:
    """Remove a folder if it exists; of a link to a folder, the link alone."""
    if path.is_symlink():
        path.unlink()
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
