"""Train what `slime-like new` writes, for the learning test and for the table of the starters."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from slime_like.cli.new import STARTERS, write_project
from slime_like.metrics.logger import read_metrics
from tests.paths import ROOT

HELD_OUT = "eval/heldout/mean"


def train(folder: Path, starter: str, seed: int, changed: str = "") -> float:
    """Create a project and run its trainings, with further flags; returns their CPU seconds.

    Raises:
        RuntimeError: a training ended with an error; the end of its output is in the message.
    """
    write_project(folder, None, starter)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for name in STARTERS[starter].runs:
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "--config", name, "--rollout-seed", str(seed),
             "--no-progress", "--no-plot", "--no-tensorboard", *changed.split()],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{starter}, seed {seed}, {name}: {done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def held_out(folder: Path) -> list[tuple[int, float]]:
    """(rollout, mean reward of the held-out rows) of a project's last training."""
    rows = read_metrics(folder / "outputs/metrics.jsonl")
    return [(int(row["step"]), row[HELD_OUT]) for row in rows if HELD_OUT in row]
