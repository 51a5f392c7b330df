"""Timeline of the phases of each rank: one file per rank in the run's folder, for the report."""

from __future__ import annotations

import json
import time
from pathlib import Path

FOLDER = "timeline"
BETWEEN = "after "  # prefix in `Progress` for the time after a phase


class PhaseTimeline:
    """Writes a line ``[phase, begin, seconds, CPU seconds]`` for each completed phase; begin in
    seconds since the epoch. With gloo, waiting for other ranks takes no CPU time, which
    distinguishes a slow rank from those that wait for it.

    Args:
        output_dir: Of the run.
        rank: Of this process.
        resumed: Append to the files of the resumed run; otherwise they are replaced.
        world_size: Files of ranks beyond it belong to an earlier run.
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
        """Called by `Progress` with the phase's name, then with "after " and the name."""
        if self._begun is not None and phase == BETWEEN + self._begun[0]:
            name, begin, clock, busy = self._begun
            seconds = (begin, time.monotonic() - clock, time.process_time() - busy)
            line = [name, *(round(value, 6) for value in seconds)]
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            self._begun = None
        elif not phase.startswith(BETWEEN):
            self._begun = (phase, time.time(), time.monotonic(), time.process_time())
