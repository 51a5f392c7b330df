"""Replace a folder by one that is written next to it, by a rename.

Both the new folder and, for a moment, the old one are in `.NAME.XXXXXXXX.work` next to the folder,
with the identity of the process that works there. What killed processes have left is removed by the
next one that replaces the folder; a folder that was moved away and not replaced yet is restored.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.checkpoints.files import sync_path
from slime_like.checkpoints.lock import is_alive, this_process
from slime_like.checkpoints.scratch import OWNER

NEW = "new"
OLD = "old"
WORK = ".work"


def folder_to_replace(folder: Path) -> Path:
    """The folder itself or, of a symbolic link, what it points to, so that the link is kept; after
    `_clean_up`. Raises ValueError if a link leads to nothing."""
    is_link = folder.is_symlink()
    target = folder
    with suppress(OSError, RuntimeError):  # a loop; RuntimeError with Python before 3.13
        target = folder.resolve() if is_link else folder
        _clean_up(target)
    if is_link and not target.is_dir():
        raise ValueError(
            f"{folder} is a symbolic link to {os.readlink(folder)}, which is no folder; create "
            "that folder, or remove the link"
        )
    return target


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends without an error; nothing
    remains of it otherwise. The block syncs what it writes. Raises ValueError like
    `folder_to_replace`."""
    new = new_folder(folder)
    try:
        yield new
        replace_folder(new, folder)
    finally:
        discard(new)


def new_folder(folder: Path) -> Path:
    """Create a folder to write what shall replace `folder`; the caller ends with `replace_folder`,
    and with `discard` in any case. Raises ValueError like `folder_to_replace`."""
    new = _work_folder(folder_to_replace(folder)) / NEW
    new.mkdir()
    return new


def discard(new: Path) -> None:
    """Remove what remains of a folder from `new_folder`."""
    shutil.rmtree(new.parent, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new`, on the same disk, to `folder`. An older folder is moved out of the way first,
    removed last, and restored if the rename fails. Raises ValueError like `folder_to_replace`."""
    folder = folder_to_replace(folder)
    work = _work_folder(folder)
    old = work / OLD
    try:
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync_path(folder.parent)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)  # if this fails, the next process does it
        shutil.rmtree(work, ignore_errors=True)


def _clean_up(folder: Path) -> None:
    """Remove what ended processes have left next to `folder`, and restore the folder if one of them
    moved it away without replacing it."""
    random = "?" * 8  # of mkdtemp; not "*", which would match those of NAME.MORE
    for work in folder.parent.glob(f".{_literal(folder.name)}.{random}{WORK}"):
        with suppress(OSError, ValueError):
            owner = json.loads((work / OWNER).read_text())
            if work.is_symlink() or not isinstance(owner, dict) or is_alive(owner) is not False:
                continue
            if (work / OLD).exists() and not folder.exists():
                (work / OLD).rename(folder)
                sync_path(folder.parent)
            shutil.rmtree(work, ignore_errors=True)


def _work_folder(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=WORK, dir=folder.parent))
    try:
        work.chmod(0o755)  # other ranks and the servers may be of another user
        (work / OWNER).write_text(json.dumps(this_process()))
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return work


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
