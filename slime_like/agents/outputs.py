"""What the programs of episodes print, in files below the output folder."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_like.agents.task import Task

logger = logging.getLogger(__name__)
FOLDER = "agent_output"
MOST_BYTES = 2**20  # of one episode: half from the start, half from the end
KEPT = 1000  # files of a rank


class EpisodeOutputs:
    """Files ``sample_17.txt`` and, of evaluations, ``evaluation_17.txt``, for the newest `KEPT`
    episodes of this process that printed something.

    Args:
        output_dir: Of the run.
    """

    def __init__(self, output_dir: Path) -> None:
        self._folder = output_dir / FOLDER
        self._written: deque[Path] = deque()
        self._failed = False

    def write(self, task: Task, output: int) -> None:
        """Keep the output of an episode. A file that cannot be written is one warning.

        Args:
            output: Descriptor of the file into which the program wrote.
        """
        size = os.fstat(output).st_size
        if not size:
            return
        kind = "evaluation" if task.evaluation else "sample"
        path = self._folder / f"{kind}_{task.sample_id}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_both_ends(output, size))
        except OSError as error:
            if not self._failed:
                logger.warning(f"output of an episode is not kept: {path}: {error.strerror}")
            self._failed = True
            return
        if path in self._written:  # a second attempt, or the next evaluation
            self._written.remove(path)
        self._written.append(path)
        if len(self._written) > KEPT:
            self._written.popleft().unlink(missing_ok=True)


def _both_ends(output: int, size: int) -> bytes:
    if size <= MOST_BYTES:
        return os.pread(output, size, 0)
    half = MOST_BYTES // 2
    cut = f"\n[{size - MOST_BYTES} bytes are left out]\n".encode()
    return os.pread(output, half, 0) + cut + os.pread(output, half, size - half)
