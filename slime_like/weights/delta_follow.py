"""Keep a node's copy of the weights at the newest update, for servers without a trainer."""

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
from slime_like.weights.delta_updates import read_update, updates_in

logger = logging.getLogger(__name__)

LOOK_S = 0.2
COPIES = "copies"  # subfolder of the updates folder with one status file per copy


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """Status of a node's copy."""

    engines: tuple[str, ...]  # servers that may load it
    folder: str
    run: str = ""  # the update that the copy contains
    number: int = 0  # the update that the copy contains
    error: str = ""  # why the copy is not at the newest update

    @property
    def update(self) -> tuple[str, int]:
        return self.run, self.number


def copy_for(source: Path, engine: str, update: tuple[str, int]) -> CopyStatus | None:
    """Status of the copy that serves `engine`; None if no node lists this server.

    A program that was started again with other servers leaves its earlier status: the copy that
    has `update` (run, number) takes precedence, then the one that was written last.
    """
    found: list[tuple[bool, int, CopyStatus]] = []
    for path in (source / COPIES).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            status = CopyStatus(**read_json(path))
            if engine in status.engines:
                found.append((status.update == update, path.stat().st_mtime_ns, status))
    return max(found, key=lambda item: item[:2])[2] if found else None


def follow(local: LocalCheckpoint, engines: list[str], stop: threading.Event) -> None:
    """Keep the copy at the newest update until `stop` is set. Errors are reported to the trainer
    through the status file and retried."""
    servers = tuple(sorted(engine.rstrip("/") for engine in engines))
    name = hashlib.sha256("\n".join(servers).encode()).hexdigest()[:16]
    path = local.source / COPIES / f"{name}.json"
    status = CopyStatus(servers, str(local.folder.absolute()))
    is_written, logged, wait_s = False, "", 0.0
    while not stop.wait(wait_s):
        before, wait_s = status, LOOK_S
        try:
            newest = _newest(local.source)
            if newest is not None and (newest != status.update or status.error):
                update = local.update_to(newest[1])
                status = dataclasses.replace(status, run=update.run, number=update.number, error="")
        except (RunError, ValueError, OSError) as error:
            status = dataclasses.replace(status, number=0, error=str(error))
        if status != before or not is_written:
            text = status.error or f"the copy {status.folder} is update {status.number}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, json.dumps(dataclasses.asdict(status)))
                is_written = True
            except OSError as error:  # repeated at the next look
                is_written = False
                text += f"; its status {path} cannot be written: {error.strerror or error}"
            if text != logged or status != before:
                logger.info(text)
                logged = text


def _newest(source: Path) -> tuple[str, int] | None:
    """Run and number of the newest update, None if there is none. A new run counts from 1 again.
    Raises ValueError for a record that cannot be read."""
    for number in reversed(updates_in(source)):
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            return read_update(source, number).run, number
    return None
