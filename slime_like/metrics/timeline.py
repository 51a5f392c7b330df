"""Timeline of the phases of each rank: one file per rank in the run's folder, for the report."""

from __future__ import annotations

import json
import time
from pathlib import Path

FOLDER = "timeline"
BETWEEN = "after "  # how `Progress` names what follows a phase


class PhaseTimeline:
    """Writes a line ``[phase, begin, seconds, processor seconds]`` for each phase that has ended;
    begin in seconds since the epoch. Waiting for other ranks takes no processor time on gloo, so
    that a slow rank is the one that is busy.

    Args:
        output_dir: of the run.
        rank: of this process.
        resumed: adds to the files of the run that it continues; any other replaces them.
        world_size: files of ranks beyond it are of an earlier run.
    """

    def __init__(
        self, output_dir: Path, rank: int, *, resumed: bool = True, world_size: int = 1
    ) -> None:
        folder = output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0 and not resumed:
            for path in folder.glob("rank*.jsonl"):
                number = path.stem.removeprefix("rank")
                if number.isdecimal() and int(number) >= world_size:
                    path.unlink()
        mode = "a" if resumed else "w"
        self._file = (folder / f"rank{rank}.jsonl").open(mode, encoding="utf-8")
        self._begun: tuple[str, float, float, float] | None = None

    def enter(self, phase: str) -> None:
        """As `Progress` calls it: the phase's name, then "after " and the name."""
        if self._begun is not None and phase == BETWEEN + self._begun[0]:
            name, begin, clock, busy = self._begun
            seconds = (begin, time.monotonic() - clock, time.process_time() - busy)
            line = [name, *(round(value, 6) for value in seconds)]
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._begun = None
        elif not phase.startswith(BETWEEN):
            self._begun = (phase, time.time(), time.monotonic(), time.process_time())
