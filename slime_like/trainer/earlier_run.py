"""What an earlier run left in --output-dir, set aside when a new run starts there.

A run that resumes continues the files of the one before it. Any other run would overwrite some of
them and mix with the rest, so they move to ``earlier-<UTC time>/`` in the same folder. Only what
runs themselves write moves: never checkpoints, exported models, databases of trackers, which hold
several runs, or files of the user.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from arguments.schema import CheckpointConfig, DebugConfig
from slime_like.agents.outputs import FOLDER as AGENT_OUTPUT
from slime_like.checkpoints.files import writes_to
from slime_like.images.recorded import IMAGES, image_path
from slime_like.logs import ERROR_FILE, LOG_FILE
from slime_like.metrics.logger import FILE_NAME as METRICS_FILE
from slime_like.metrics.timeline import FOLDER as TIMELINE
from slime_like.metrics.trackers.base import IDS_FILE
from slime_like.report.read import CERTIFICATES, PROFILE, STACKS

PREFIX = "earlier-"
UNFINISHED = ".unfinished"  # end of the folder's name while files are moved into it
# By patterns, because a folder of the user may have one of these names. First what the run that
# starts has not written when its checkpoint has been loaded.
WRITTEN_LATER = (
    *(f"{CERTIFICATES}/rollout_*.json", "tensorboard/**/events.out.tfevents.*"),
    *("report.html", "report.png"),
)
RUN_FILES = (
    *(f"{STACKS}/rank*", f"{TIMELINE}/rank*.jsonl", f"{PROFILE}/*rank[0-9]*"),
    *("engines/*.log", f"{AGENT_OUTPUT}/sample_*.txt", f"{AGENT_OUTPUT}/evaluation_*.txt"),
    *WRITTEN_LATER,
    *(ERROR_FILE, LOG_FILE, IDS_FILE, "run.json"),
)
logger = logging.getLogger(__name__)


def resumes(flags: CheckpointConfig) -> bool:
    """Whether the run continues the one that wrote its output folder. It may still turn out, when
    the checkpoint is loaded, that it starts at rollout 1."""
    from slime_like.checkpoints.folders import is_checkpoint_root

    if flags.load is None or flags.finetune:
        return False
    if flags.checkpoint_replicas and flags.load_is_save:
        return True  # the checkpoint may be in the memory of another node
    return flags.ckpt_step is not None or is_checkpoint_root(flags.load)


def set_aside_earlier_run(debug: DebugConfig, folder: Path, *, begun: bool = False) -> None:
    """Move the files of an earlier run out of the way, and say so in one line. Nothing happens if
    there are neither metrics nor recorded rollouts of one. A move that a kill interrupted is
    completed: metrics.jsonl goes last, and the folder gets its name at the end.

    Args:
        folder: --output-dir.
        begun: The new run has written its first files, which stay.

    Raises:
        OSError: `folder` cannot be written.
    """
    unfinished = sorted(folder.glob(f"{PREFIX}*{UNFINISHED}"))
    metrics = folder / METRICS_FILE
    recorded = _recorded(debug, folder)
    if not (_has_metrics(folder) or recorded or unfinished):
        return
    with writes_to("--output-dir", folder):
        place = unfinished[0] if unfinished else _new_place(folder)
        patterns = WRITTEN_LATER if begun else RUN_FILES
        written = [path for each in patterns for path in sorted(folder.glob(each))]
        for path in [*recorded, *written, metrics]:
            if path.is_file() or path.is_symlink():
                _move(path, folder, place)
        final = place.with_name(place.name.removesuffix(UNFINISHED))
        os.rename(place, final)
    logger.info(
        f"{folder} had an earlier run, whose metrics, rollouts and logs are now in {final}; "
        "checkpoints stay (--load continues from one)"
    )


def put_back(folder: Path, load: str | None) -> None:
    """Undo a move, for a run that resumes the one whose files it moved: one that a kill
    interrupted, or that of a run that was started without --load and ended before its first
    metrics.

    Args:
        folder: --output-dir.
        load: The checkpoints' folder.
    """
    with writes_to("--output-dir", folder):
        places = sorted(folder.glob(f"{PREFIX}*{UNFINISHED}"))
        if not places and not _has_metrics(folder):
            places = sorted(place for place in folder.glob(f"{PREFIX}*") if _saved(place, load))
            places = places[-1:]
        for place in places:
            moved = list(place.rglob("*"))
            for path in moved:
                if path.is_symlink() or not path.is_dir():
                    _move(path, place, folder)
            folders = [path for path in moved if path.is_dir() and not path.is_symlink()]
            for path in sorted([place, *folders], reverse=True):
                path.rmdir()


def _move(path: Path, source: Path, target: Path) -> None:
    """Move a file to the same place below another folder."""
    path_there = target / path.relative_to(source)
    path_there.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, path_there)


def _has_metrics(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    return metrics.is_file() and metrics.stat().st_size > 0


def _saved(place: Path, load: str | None) -> bool:
    """Whether the run of these files saved the checkpoints that are loaded."""
    save = _setting_of_run(place, "--save")
    if save is None or load is None or not _has_metrics(place):
        return False
    return os.path.realpath(save) == os.path.realpath(load)


def _new_place(folder: Path) -> Path:
    """A new folder whose final name is free, too."""
    name = PREFIX + time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{name.split('.')[0]}.{number}"
    place = folder / (name + UNFINISHED)
    place.mkdir(parents=True)
    return place


def _recorded(debug: DebugConfig, folder: Path) -> list[Path]:
    """Recorded rollouts below `folder` of the earlier run and where the new one will record. None
    if the new one reads rollouts from there, which may be any of them."""
    reads = debug.load_debug_rollout_data
    if reads is not None and Path(os.path.realpath(reads)).is_relative_to(os.path.realpath(folder)):
        return []
    earlier = _setting_of_run(folder, "--save-debug-rollout-data")
    templates = {earlier, debug.save_debug_rollout_data}
    found = {path for template in templates if template for path in _files(template, folder)}
    return sorted(found)


def _setting_of_run(folder: Path, flag: str) -> str | None:
    """A flag of the run that wrote the folder."""
    try:
        value = json.loads((folder / "run.json").read_text(encoding="utf-8"))["config"][flag]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) else None


def _files(template: str, folder: Path) -> Iterator[Path]:
    """The files of recorded rollouts, if they are below `folder`, as paths that begin with it."""
    stem = Path(template.removesuffix(".json").removesuffix(".safetensors")).absolute()
    parent = Path(os.path.normpath(stem.parent))
    root = Path(os.path.normpath(folder.absolute()))
    if not parent.is_relative_to(root) or "{rollout_id}" not in stem.name:
        return
    pattern = re.escape(stem.name).replace(re.escape("{rollout_id}"), "[0-9]+")
    ending = r"(\.(tokens|train[0-9]+))?\.(json|safetensors)"
    place = folder / parent.relative_to(root)
    yield from (path for path in place.glob("*") if re.fullmatch(pattern + ending, path.name))
    yield from (place / IMAGES).glob(image_path(Path(), "*").name)
