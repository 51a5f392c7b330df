"""The benchmark of checkpoints runs, on an optimizer that has not stepped yet: both ways to save, and the loads of what they wrote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_its_table_is_whole(tmp_path: Path) -> None:
    words = f"--hidden-size 32 --num-layers 2 --repeat 1 --folder {tmp_path / 'bench'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "scripts/bench_checkpoint.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^\| ([a-z, :]+) \| (\d+\.\d\d) \| (\d+\.\d\d) \|$", done.stdout, re.MULTILINE)
    assert {name for name, _, _ in rows} >= {"synchronous save: training blocked", "asynchronous save: until published", "load, verified"}
    assert not (tmp_path / "bench").exists()
