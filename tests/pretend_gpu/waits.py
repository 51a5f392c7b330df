"""Waits of the host for the device, and copies between them, counted by source line.

A wait is whatever stops the host until the device has done what was queued: `.item()`, a blocking
copy, `nonzero`, an index by a mask, `torch.cuda.synchronize()`. Kinds with "async" are copies that
do not wait.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from tests.pretend_gpu.build import ROOT
from tests.pretend_gpu.extension import C

OURS = tuple(f"{ROOT / name}/" for name in ("slime_like", "arguments", "megatron_patches"))
HARNESS = str(Path(__file__).parent)


@dataclass(frozen=True, order=True)
class Wait:
    """A place where the host waited for the device."""

    phase: str  # what the run did, see `phase`
    kind: str  # how the host waited
    op: str  # torch's operator
    ours: str  # innermost line of this project, "file:line function"
    caller: str  # innermost line outside torch

    @property
    def blocks(self) -> bool:
        return "async" not in self.kind


class Waits:
    """Counts since the last `clear`, of all threads."""

    def __init__(self) -> None:
        self.counts: Counter[Wait] = Counter()
        self._lock = threading.Lock()
        self._phase = threading.local()

    def start(self) -> None:
        self.counts.clear()
        C.set_hook(self._count)
        C.counting(True)

    def stop(self) -> dict[Wait, int]:
        C.counting(False)
        return dict(self.counts)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count this thread's waits under `name`."""
        before = getattr(self._phase, "name", "")
        self._phase.name = name
        try:
            yield
        finally:
            self._phase.name = before

    def _count(self, kind: str, op: str, nbytes: int) -> None:
        try:
            frame: FrameType | None = sys._getframe(1)
        except ValueError:  # a thread of the autograd engine
            frame = None
        ours = caller = ""
        while frame is not None and not ours:
            file = frame.f_code.co_filename
            if not file.startswith(HARNESS) and "/contextlib" not in file:
                where = f"{_short(file)}:{frame.f_lineno} {frame.f_code.co_name}"
                if not caller and "/torch/" not in file:
                    caller = where
                if file.startswith(OURS):
                    ours = where
            frame = frame.f_back
        with self._lock:
            self.counts[
                Wait(
                    getattr(self._phase, "name", ""), kind, op.removeprefix("aten::"), ours, caller
                )
            ] += 1


def _short(file: str) -> str:
    return file.rpartition("/site-packages/")[2].removeprefix(f"{ROOT}/")


WAITS = Waits()


def count_for_file() -> None:
    """Count from now to the exit of this process, for `pretend(waits=...)`."""
    path = Path(f"{os.environ['PRETEND_CUDA_WAITS']}.{os.environ.get('RANK', '0')}.json")
    WAITS.start()
    atexit.register(lambda: path.write_text(json.dumps(rows(WAITS.stop()), indent=0)))


def rows(counts: dict[Wait, int]) -> list[dict[str, object]]:
    return [{**asdict(wait), "count": count} for wait, count in sorted(counts.items())]
