"""A node's folder for in-memory checkpoints (--checkpoint-replicas): the run that it belongs to,
and the intact files in it.

    <base>/<id>/save.txt            the --save folder with this id
    <base>/<id>/iter_0000007/       parts of this node and the previous one, and the full manifest

The id is stored in --save. A folder is removed if its --save has another id or none, and if it is
one of these: it has such a name, and nothing else in it.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slime_like.checkpoints.files import hash_file, hashed_file, remove_folder, write_file
from slime_like.checkpoints.manifest import MANIFEST, read_manifest

ID = "replicas.id"
OWNER = "save.txt"
COPY_BYTES = 4 * 2**20
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_CHECKPOINT = re.compile(r"iter_\d{7,}(\.[a-z]+)?")


def run_id(save: Path) -> str:
    """Id of a checkpoint folder; created if it has none."""
    path = save / ID
    if not path.is_file():
        save.mkdir(parents=True, exist_ok=True)
        write_file(path, uuid.uuid4().hex)
    return path.read_text(encoding="ascii").strip()


def node_folder(base: str | None, name: str, save: Path) -> Path:
    """Create this node's folder for the in-memory checkpoints of `save`.

    Args:
        base: Value of --checkpoint-replica-dir; None: a folder of this user in /dev/shm.
        name: Id from `run_id`.

    Raises:
        ValueError: The folder belongs to another user.
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
    for folder in filter(_is_of_a_run, root.iterdir()):
        with suppress(OSError, ValueError):
            file = Path((folder / OWNER).read_text(encoding="utf-8"), ID)
            if not file.is_file() or file.read_text(encoding="ascii").strip() != folder.name:
                remove_folder(folder)


def _is_of_a_run(folder: Path) -> bool:
    """Whether a run has made this folder, and nobody has put anything else into it."""
    if not _RUN_ID.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return OWNER in names and all(map(_CHECKPOINT.fullmatch, names - {OWNER}))


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Part of a checkpoint that a node holds."""

    manifest: str  # SHA-256 of the manifest
    total: int  # number of files in the full checkpoint
    files: list[str]  # names of the intact files on this node


def intact_files(folder: Path) -> NodeFiles:
    """Find the intact files of a checkpoint folder. Raises ValueError or OSError if the manifest is
    missing or damaged."""
    records = read_manifest(folder)
    intact = []
    for name, record in records.items():
        with suppress(OSError):
            if hash_file(folder / name, folder) == record:
                intact.append(name)
    return NodeFiles(hash_file(folder / MANIFEST, folder).sha256, len(records), intact)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file and sync `target` to disk."""
    with open(source, "rb") as file, hashed_file(target) as copy:
        while block := file.read(COPY_BYTES):
            copy.write(block)
