"""Next to servers on a node without a trainer: the node's copy of the weights at the newest update."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from slime_like.checkpoints.files import read_json, replace_file
from slime_like.errors import RunError
from slime_like.weights.delta_local import LocalCheckpoint
from slime_like.weights.delta_updates import updates_in

logger = logging.getLogger(__name__)

LOOK_S = 0.2
COPIES = "copies"  # below the folder of updates: a file for each copy


@dataclass(frozen=True, slots=True)
class Copy:
    """What a node says of its copy. engines: the servers that may load it. run, number: of the
    update that it is; error: why it is not the newest."""

    engines: tuple[str, ...]
    folder: str
    run: str = ""
    number: int = 0
    error: str = ""

    @property
    def update(self) -> tuple[str, int]:
        return self.run, self.number


def copy_for(source: Path, engine: str) -> Copy | None:
    """Of the node that names the server; None where none does."""
    for path in (source / COPIES).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = Copy(**read_json(path))
            if engine in found.engines:
                return found
    return None


def follow(local: LocalCheckpoint, engines: list[str], stop: threading.Event) -> None:
    """Bring the copy to the newest update, again and again, until `stop`. What goes wrong is
    tried again, and the trainer knows of it."""
    own = tuple(sorted(engine.rstrip("/") for engine in engines))
    name = hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]
    path = local.source / COPIES / f"{name}.json"
    stated = Copy(own, str(local.folder.absolute()))
    is_stated = False
    while not stop.wait(LOOK_S if is_stated else 0.0):
        newest = max(updates_in(local.source), default=0)
        before = stated
        if newest and (newest != stated.number or stated.error):
            try:
                update = local.bring(newest)
                stated = dataclasses.replace(stated, run=update.run, number=newest, error="")
            except (RunError, ValueError, OSError) as error:
                stated = dataclasses.replace(stated, number=0, error=str(error))
        if stated != before or not is_stated:
            with contextlib.suppress(OSError):  # it comes with the next one
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(dataclasses.asdict(stated)))
                is_stated = True
            logger.info(stated.error or f"the copy {stated.folder} is update {stated.number}")
