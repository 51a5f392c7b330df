"""What `slime-like new` writes learns its task, and not only the prompts that it is trained on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.cli.new import write_recipe
from slime_like.metrics.logger import read_metrics
from tests.learning.test_learning import SEEDS
from tests.paths import ROOT


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_starter_learns_its_task(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "my_task"
    write_recipe(folder, None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", "run.yaml",
         "--rollout-seed", str(seed), "--no-progress", "--no-plot", "--no-tensorboard"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    key = "eval/heldout/mean"
    held_out = [row[key] for row in read_metrics(folder / "outputs/metrics.jsonl") if key in row]
    assert held_out[0] <= 0.1 and held_out[-1] >= 0.9, held_out
