"""Folders of checkpoints: names, the newest, what a killed process has left, publishing, removing.
See the package's docstring."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from slime_like.checkpoints.files import open_regular, remove_folder, sync_path, write_file
from slime_like.checkpoints.manifest import MANIFEST

TRACKER = "latest_checkpointed_iteration.txt"
NEXT_TRACKER = TRACKER + ".tmp"
WRITING, REPLACED, REMOVED = ".tmp", ".replaced", ".removed"
_NAME = re.compile(r"iter_(\d+)$")


def checkpoint_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def writing_folder(root: str | Path, step: int) -> Path:
    """Where checkpoint `step` is until it is published."""
    return Path(root) / f"iter_{step:07d}{WRITING}"


def complete_steps(root: str | Path) -> list[int]:
    """Steps of the complete checkpoints in `root`, ascending."""
    return sorted(
        int(found[1])
        for path in Path(root).glob(f"iter_*/{MANIFEST}")
        if (found := _NAME.match(path.parent.name))
    )


def is_checkpoint_root(root: str | Path) -> bool:
    """Whether `root` holds checkpoints of ours, whole or damaged, rather than a Hugging Face model,
    nothing, or a first save that was cut short."""
    return (Path(root) / TRACKER).exists() or any(
        _NAME.match(path.name) for path in Path(root).glob("iter_*")
    )


def newest_step(root: str | Path, flag: str = "--load") -> tuple[int, str | None]:
    """The step that the tracker names (or the one that was about to take its place when the process
    was killed), and None. Where the tracker is missing, unreadable or names a checkpoint that is
    not complete: the newest complete one, and a warning. Raises ValueError when there is none: a
    run never starts over unasked."""
    path, steps = Path(root) / TRACKER, complete_steps(root)
    if (published := _half_published(root)) is not None:
        return published, None
    try:
        named = _step_in(path)
        problem = None if named in steps else f"names step {named}, which is not complete"
    except OSError:
        named, problem = None, "is missing"
    except ValueError:
        named, problem = None, "holds no step"
    if problem is None and named is not None:
        return named, None
    if not steps:
        raise ValueError(
            f"{flag} {root}: {TRACKER} {problem}, and there is no complete checkpoint beside it; name another folder"
        )
    return (
        steps[-1],
        f"{flag} {root}: {TRACKER} {problem}; taking the newest complete checkpoint, step {steps[-1]}",
    )


def clean_up(root: str | Path) -> list[str]:
    """Undo what a process that was killed while it saved has left in `root`, which nobody else may
    be writing to. Returns what was done.

    A checkpoint that has its name already gets the tracker too. One that was set aside for its
    successor comes back unless that one was published; half-written and half-removed ones go."""
    done = []
    if (published := _half_published(root)) is not None:
        os.replace(Path(root) / NEXT_TRACKER, Path(root) / TRACKER)
        done.append(f"{TRACKER} set to {published}")
    else:
        (Path(root) / NEXT_TRACKER).unlink(missing_ok=True)
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
    """The step of a checkpoint that got its name, and not yet the tracker. See `publish`."""
    try:
        step = _step_in(Path(root) / NEXT_TRACKER)
    except (OSError, ValueError):
        return None
    return step if step in complete_steps(root) else None


def _step_in(tracker: Path) -> int:
    """Raises OSError or ValueError."""
    with open_regular(tracker) as file:
        return int(file.read(64))


def publish(root: str | Path, step: int) -> Path:
    """Give the checkpoint its name, and then the tracker its step. Everything in the folder must be
    on the disk. An older checkpoint of the same step is set aside until the new one has its name.
    The next tracker is written before, so that a kill between the two leaves no doubt: which of the
    complete steps is the newest is not for their numbers to say, a run may have gone back."""
    final, temporary = checkpoint_folder(root, step), writing_folder(root, step)
    aside = final.with_name(final.name + REPLACED)
    if final.exists():
        remove_folder(aside)
        os.rename(final, aside)
    write_file(Path(root) / NEXT_TRACKER, str(step))
    os.rename(temporary, final)
    sync_path(final.parent)
    os.replace(Path(root) / NEXT_TRACKER, Path(root) / TRACKER)
    sync_path(final.parent)
    remove_folder(aside)
    return final


def steps_to_remove(
    steps: list[int], newest: int, *, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Which checkpoints may go, now that step `newest` is on the disk. Kept are the last
    `keep_last` (1 where only keep_every is given) up to the newest, and every multiple of
    `keep_every`. Steps beyond the newest are of a run that went another way: they stay."""
    if keep_last is None and keep_every is None:
        return []
    past = sorted(step for step in steps if step <= newest)
    last = set(past[-(keep_last or 1) :])
    return [
        step for step in past if step not in last and not (keep_every and step % keep_every == 0)
    ]


def remove_checkpoint(root: str | Path, step: int) -> None:
    """It has lost its name before its first file goes, so that half a checkpoint is never taken for
    a whole one."""
    folder = checkpoint_folder(root, step)
    going = folder.with_name(folder.name + REMOVED)
    remove_folder(going)
    os.rename(folder, going)
    sync_path(folder.parent)
    remove_folder(going)


def free_bytes(root: str | Path) -> int:
    """Of the disk that `root` lies on, or will."""
    there = next(path for path in (Path(root), *Path(root).absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
