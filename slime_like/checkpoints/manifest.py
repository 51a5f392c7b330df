"""The manifest: size and SHA-256 of every file of a checkpoint. It is written last, so a folder
without one is incomplete, and it is checked before any other file of the checkpoint is read. It
detects damage, not tampering: whoever can change a file can also change the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from slime_like import __version__
from slime_like.checked_json import StrictModel, read
from slime_like.checkpoints.files import (
    FileRecord,
    hash_file,
    read_json,
    size_inside,
    write_file,
)

MANIFEST = "manifest.json"
FORMAT = 1
Records = Mapping[str, FileRecord]  # path inside the checkpoint, with forward slashes -> record


class _Record(StrictModel):
    size: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Manifest(StrictModel):
    format: Literal[1]
    files: dict[str, _Record]
    identity: dict[str, dict[str, object]] = Field(default_factory=dict)


def write_manifest(
    folder: Path, records: Records, identity: Mapping[str, object] | None = None
) -> None:
    """Write the manifest, which makes the folder a complete checkpoint.

    Args:
        folder: Folder with all other files, synced to disk.
        records: Records of all files.
        identity: "model" and "tokenizer", each plain JSON by setting; a run that resumes must have
            the same.
    """
    files = {name: {"size": r.size, "sha256": r.sha256} for name, r in sorted(records.items())}
    content = {
        "format": FORMAT,
        "slime_like": __version__,
        "identity": dict(identity or {}),
        "files": files,
    }
    write_file(folder / MANIFEST, json.dumps(content, indent=1, allow_nan=False))


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read the records of a checkpoint's files.

    Raises:
        ValueError: The manifest is missing or damaged, or contains a path that cannot be a file of
            the checkpoint; names the file.
    """
    records = {}
    for name, record in _read(folder).files.items():
        if problem := _path_problem(name):
            raise ValueError(f"checkpoint {folder}: {MANIFEST} names {name[:200]!r}, {problem}")
        records[name] = FileRecord(record.size, record.sha256)
    return records


def read_identity(folder: Path) -> dict[str, dict[str, object]]:
    """Read the identity of the run that saved: "model" and "tokenizer", each by setting. Older
    checkpoints have neither.

    Raises:
        ValueError: As for `read_manifest`.
    """
    return _read(folder).identity


def identity_differences(
    saved: Mapping[str, object], current: Mapping[str, object], place: str = "here"
) -> list[str]:
    """Descriptions, with both values, of settings that are in both and differ.

    Args:
        place: Where the current ones are.
    """
    return [
        f"{name} {saved[name]} ({place}: {value})"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]


def _read(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    try:
        return read(_Manifest, read_json(path, folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {folder}: {path.name} is missing or damaged ({error})"
        ) from error


def _path_problem(name: str) -> str | None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "outside the checkpoint"
    if str(path) != name or name == "." or not name.isprintable():
        return "which is not the name of a checkpoint file"
    return None


def damaged_files(
    folder: Path, records: Records, names: Iterable[str], *, threads: int
) -> list[str]:
    """Descriptions of those files among `names` that differ from the manifest. Only regular files
    inside the folder with the right size are read."""

    def check(name: str) -> str | None:
        if problem := size_problem(folder, name, records[name].size):
            return problem
        try:
            same = hash_file(folder / name, folder) == records[name]
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        return None if same else f"{name}: its SHA-256 is not the one it was written with"

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return [problem for problem in pool.map(check, names) if problem is not None]


def size_problem(folder: Path, name: str, size: int) -> str | None:
    """What is wrong with a file that should be regular and `size` bytes long, without reading it;
    None if nothing is."""
    try:
        actual = size_inside(folder / name, folder)
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None if actual == size else f"{name}: {actual} bytes, not {size}"


def split_by_size(records: Records, parts: int) -> list[list[str]]:
    """Distribute the file names over `parts` readers with about equal numbers of bytes."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(records, key=lambda n: (-records[n].size, n)):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += records[name].size
    return shares


def total_bytes(records: Records) -> int:
    return sum(record.size for record in records.values())


def describe(problems: Sequence[str], limit: int = 3) -> str:
    omitted = len(problems) - limit
    return "; ".join(problems[:limit]) + (f"; and {omitted} more" if omitted > 0 else "")
