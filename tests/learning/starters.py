"""Train what `slime-like new` writes, for the learning test and for the table of the starters."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from slime_like.cli.new import STARTERS, write_project
from slime_like.metrics.logger import read_metrics
from tests.paths import ROOT

HELD_OUT = "eval/heldout/mean"
SECONDS = "seconds.json"  # in the folder of a project: that its trainings are complete


def train(folder: Path, starter: str, seed: int, changed: str = "") -> None:
    """Create a project and run its trainings, with further flags; their CPU seconds are in SECONDS.

    Raises:
        RuntimeError: a training ended with an error; the end of its output is in the message.
    """
    write_project(folder, None, starter)
    users = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for name in STARTERS[starter].runs:
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "--config", name, "--rollout-seed", str(seed),
             "--no-progress", "--no-plot", "--no-tensorboard", *changed.split()],
            cwd=folder,
            env=users,  # who follows the pages sets no number of threads
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{starter}, seed {seed}, {name}: {done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (folder / SECONDS).write_text(json.dumps(cpu_s), encoding="utf-8")


def held_out(folder: Path) -> list[tuple[int, float]]:
    """(rollout, mean reward of the held-out rows) of a project's last training."""
    rows = read_metrics(folder / "outputs/metrics.jsonl")
    return [(int(row["step"]), row[HELD_OUT]) for row in rows if HELD_OUT in row]
