"""The folder in which a node keeps checkpoints in its memory (--checkpoint-replicas): to which
run it belongs, and which whole files are in it.

    <base>/<id>/save.txt            the --save that has this id
    <base>/<id>/iter_0000007/       this node's part, that of the node before, and the manifest of all

The id lies in --save. A folder is removed when its --save has another one, or none.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slime_like.checkpoints.files import hash_file, hashed_file, remove_folder, write_file
from slime_like.checkpoints.manifest import MANIFEST, read_manifest

ID, OWNER = "replicas.id", "save.txt"
COPY_BYTES = 4 * 2**20


def run_id(save: Path) -> str:
    """Of a folder of checkpoints; made where it has none."""
    path = save / ID
    if not path.is_file():
        save.mkdir(parents=True, exist_ok=True)
        write_file(path, uuid.uuid4().hex)
    return path.read_text(encoding="ascii").strip()


def node_folder(base: str | None, name: str, save: Path) -> Path:
    """This node's folder for the checkpoints of `save`.

    Args:
        name: its id, of `run_id`.
        base: of --checkpoint-replica-dir; None: in /dev/shm, for this user alone.

    Raises:
        ValueError: the folder is another user's.
    """
    root = Path(base or f"/dev/shm/slime_like-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise ValueError(f"--checkpoint-replica-dir {root}: belongs to another user; name another")
    _remove_orphans(root)
    folder = root / name
    folder.mkdir(mode=0o700, exist_ok=True)
    write_file(folder / OWNER, str(save.resolve()))
    return folder


def _remove_orphans(root: Path) -> None:
    for owner in root.glob(f"*/{OWNER}"):
        with suppress(OSError, ValueError):
            file = Path(owner.read_text(encoding="utf-8"), ID)
            if not file.is_file() or file.read_text(encoding="ascii").strip() != owner.parent.name:
                remove_folder(owner.parent)


@dataclass(frozen=True, slots=True)
class Held:
    """What a node has of a checkpoint. manifest: its SHA-256. of: how many files the checkpoint
    has. files: names of those that are here, as they were written."""

    manifest: str
    of: int
    files: list[str]


def whole_files(folder: Path) -> Held:
    """Raises ValueError or OSError where the manifest is missing or damaged."""
    records = read_manifest(folder)
    found = []
    for name, record in records.items():
        with suppress(OSError):
            if hash_file(folder / name, folder) == record:
                found.append(name)
    return Held(hash_file(folder / MANIFEST, folder).sha256, len(records), found)


def copy_file(source: Path, target: Path) -> None:
    """`target` is on the disk afterwards."""
    with open(source, "rb") as file, hashed_file(target) as copy:
        while block := file.read(COPY_BYTES):
            copy.write(block)
