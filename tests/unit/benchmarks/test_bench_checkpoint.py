"""The benchmarks of checkpoints and of conversions run, on an optimizer that has not stepped yet:
both ways to save, and the loads of what they wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.mark.extended
def test_its_table_is_whole(tmp_path: Path) -> None:
    words = f"--hidden-size 32 --num-layers 2 --repeat 1 --folder {tmp_path / 'bench'}"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "benchmarks/bench_checkpoint.py", *words.split()]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(
        r"^\| ([a-z, :]+) \| (\d+\.\d\d) \| (\d+\.\d\d) \|$", done.stdout, re.MULTILINE
    )
    assert {name for name, _, _ in rows} >= {
        "synchronous save: training blocked",
        "asynchronous save: until published",
        "load, verified",
    }
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow
def test_conversions_are_measured(tmp_path: Path) -> None:
    """Against a copy and transformers, at two sizes. Loading a whole model takes its bytes,
    converting it does not."""
    result = tmp_path / "convert.json"
    words = (
        f"--layers 2 20 --hidden-size 512 --repeat 1 --folder {tmp_path / 'bench'} --json {result}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "benchmarks/bench_convert.py", *words.split()]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = json.loads(result.read_text())["results"]
    assert small.keys() == large.keys() and all(
        row["s"] > 0 and row["peak_mib"] >= 0 for row in (*small.values(), *large.values())
    )
    size = large["plain copy of the files"]["gb"] * 1e9 / 2**20
    assert (
        large["transformers, load and save"]["peak_mib"]
        > 0.8 * size
        > 2 * large["to Megatron"]["peak_mib"]
    )
