"""Checkpoint folders: names, finding the newest, cleaning up after a killed process, publishing and
removing. See the package's docstring."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from slime_like.checkpoints.files import (
    hash_file,
    open_regular,
    remove_folder,
    replace_file,
    sync_path,
    write_file,
)
from slime_like.checkpoints.manifest import MANIFEST

TRACKER = "latest_checkpointed_iteration.txt"
NEXT_TRACKER = TRACKER + ".next"
WRITING = ".tmp"
REPLACED = ".replaced"
REMOVED = ".removed"
_NAME = re.compile(r"iter_(\d+)$")


def checkpoint_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def writing_folder(root: str | Path, step: int) -> Path:
    """Folder in which checkpoint `step` is written before it is published."""
    return Path(root) / f"iter_{step:07d}{WRITING}"


def complete_steps(root: str | Path) -> list[int]:
    """Steps of the complete checkpoints in `root`, ascending."""
    folders = (path.parent.name for path in Path(root).glob(f"iter_*/{MANIFEST}"))
    return sorted(int(match[1]) for match in map(_NAME.match, folders) if match)


def check_replaceable(folder: Path, file: str, kind: str) -> None:
    """Raise ValueError if `folder` exists, is not empty, and does not contain `file`."""
    replaceable = folder.is_dir() and ((folder / file).is_file() or not any(folder.iterdir()))
    if folder.exists() and not replaceable:
        raise ValueError(
            f"{folder} exists and holds no {kind}; it is not replaced. Remove it or save elsewhere"
        )


def has_model(folder: str | Path) -> bool:
    """Whether a folder has checkpoints or a Hugging Face model."""
    return is_checkpoint_root(folder) or (Path(folder) / "config.json").is_file()


def is_checkpoint_root(root: str | Path) -> bool:
    """Whether `root` contains our checkpoints, complete or damaged. False for a Hugging Face model,
    an empty folder, or one with only an interrupted first save."""
    return (Path(root) / TRACKER).exists() or any(
        _NAME.match(path.name) for path in Path(root).glob("iter_*")
    )


def newest_step(root: str | Path, flag: str = "--load") -> tuple[int, str | None]:
    """Step of the checkpoint to load.

    Returns:
        (step, None) for the step in the tracker, or the one whose publication a kill interrupted.
        (newest complete step, warning) if the tracker is missing, unreadable or names an incomplete
        checkpoint; (step in the tracker, warning) if there is a note of another publication.

    Raises:
        ValueError: There is no complete checkpoint. A run never silently starts over.
    """
    path = Path(root) / TRACKER
    steps = complete_steps(root)
    if (published := _half_published(root)) is not None:
        return published, None
    try:
        named = _step_in(path)
        problem = None if named in steps else f"names step {named}, which is not complete"
    except OSError:
        named = None
        problem = "is missing"
    except ValueError:
        named = None
        problem = "holds no step"
    if problem is None and named is not None:
        return named, _stale_note(root, flag)
    problem = f"{flag} {root}: {TRACKER} {problem}"
    if not steps:
        raise ValueError(f"{problem}, and there is no complete checkpoint; name another folder")
    return steps[-1], f"{problem}; taking the newest complete checkpoint, step {steps[-1]}"


def clean_up(root: str | Path) -> list[str]:
    """Clean up after a process that was killed while saving to `root`; no other process may write
    there. Returns what was done.

    A checkpoint that already has its final name is entered in the tracker. One that was set aside
    for a replacement is restored unless the replacement was published. Partially written and
    partially removed checkpoints are removed."""
    done = []
    if (published := _half_published(root)) is not None:
        replace_file(Path(root) / TRACKER, str(published))
        done.append(f"{TRACKER} set to {published}")
    elif (warning := _stale_note(root, "")) is not None:
        done.append(warning.strip())
    for name in (NEXT_TRACKER, TRACKER + WRITING):
        (Path(root) / name).unlink(missing_ok=True)
    for path in sorted(Path(root).glob(f"iter_*{REPLACED}")):
        final = path.with_name(path.name.removesuffix(REPLACED))
        if _NAME.match(final.name) and not final.exists():
            os.rename(path, final)
            done.append(f"{final.name} restored")
        else:
            remove_folder(path)
    for ending in (WRITING, REMOVED):
        for path in sorted(Path(root).glob(f"iter_*{ending}")):
            if _NAME.match(path.name.removesuffix(ending)):
                remove_folder(path)
                done.append(f"{path.name} removed")
    return done


def _half_published(root: str | Path) -> int | None:
    """Step of a checkpoint that has its final name but is not in the tracker yet; see `publish`."""
    note = _note(root)
    if note is None:
        return None
    step, before, manifest = note
    try:
        is_next = _tracked(root) == before
        is_whole = hash_file(checkpoint_folder(root, step) / MANIFEST).sha256 == manifest
    except OSError:
        return None
    return step if is_next and is_whole else None


def _note(root: str | Path) -> tuple[int, int | None, str] | None:
    """The note of `publish` about what it does: the step, the step in the tracker before it, and
    the hash of the manifest; None if there is none."""
    try:
        with open_regular(Path(root) / NEXT_TRACKER) as file:
            note = json.loads(file.read(1000))
        before = note["before"]
        return int(note["step"]), None if before is None else int(before), str(note["manifest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _stale_note(root: str | Path, flag: str) -> str | None:
    """Warning about a note of `publish` that does not fit to the tracker, as in a copy of another
    time; it is not followed."""
    note = _note(root)
    if note is None or _tracked(root) in note[:2]:
        return None
    return f"{flag} {root}: {NEXT_TRACKER} is of another save (step {note[0]}) and is not followed"


def _tracked(root: str | Path) -> int | None:
    """The step in the tracker; None if it holds none."""
    try:
        return _step_in(Path(root) / TRACKER)
    except (OSError, ValueError):
        return None


def _step_in(tracker: Path) -> int:
    """The step in a tracker file. Raises OSError or ValueError."""
    with open_regular(tracker) as file:
        return int(file.read(64))


def publish(root: str | Path, step: int) -> Path:
    """Rename the checkpoint to its final name, then update the tracker. All files must be synced to
    disk. An older checkpoint of the same step is set aside until the new one has its name.

    A note is written before the rename, so that after a kill in between it is known which complete
    checkpoint is the newest: not always the one with the largest step, since a run may have resumed
    from an earlier one. It names the checkpoint and the tracker that it is to replace, and is not
    followed anywhere else."""
    final = checkpoint_folder(root, step)
    temporary = writing_folder(root, step)
    aside = final.with_name(final.name + REPLACED)
    manifest = hash_file(temporary / MANIFEST).sha256
    note = {"step": step, "before": _tracked(root), "manifest": manifest}
    write_file(Path(root) / NEXT_TRACKER, json.dumps(note))
    is_replaced = final.exists()
    if is_replaced:
        remove_folder(aside)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if is_replaced:
            os.rename(aside, final)
        raise
    sync_path(final.parent)
    replace_file(Path(root) / TRACKER, str(step))
    sync_path(final.parent)
    (Path(root) / NEXT_TRACKER).unlink(missing_ok=True)
    remove_folder(aside)
    return final


def steps_to_remove(
    steps: list[int], newest: int, *, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Steps of checkpoints to remove, now that step `newest` is on disk. The last `keep_last` (1 if
    only keep_every is given) up to the newest are kept, and all multiples of `keep_every`. Steps
    after the newest, which belong to another course of the run, are kept too."""
    if keep_last is None and keep_every is None:
        return []
    past = sorted(step for step in steps if step <= newest)
    last = set(past[-(keep_last or 1) :])
    return [
        step for step in past if step not in last and not (keep_every and step % keep_every == 0)
    ]


def remove_checkpoint(root: str | Path, step: int) -> None:
    """Remove a checkpoint. It is renamed before its files are deleted, so that a partly deleted
    checkpoint is never mistaken for a complete one."""
    folder = checkpoint_folder(root, step)
    removed = folder.with_name(folder.name + REMOVED)
    remove_folder(removed)
    os.rename(folder, removed)
    sync_path(folder.parent)
    remove_folder(removed)


def free_bytes(root: str | Path) -> int:
    """Free bytes of the disk that `root` is on or will be created on."""
    parents = (Path(root), *Path(root).absolute().parents)
    return shutil.disk_usage(next(path for path in parents if path.exists())).free
