"""examples/minimal_rl.py: the loop on the public API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import Workspace
from tests.paths import ROOT

EXAMPLE = ROOT / "examples/minimal_rl.py"
SMALL = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--micro-batch-size", "8"]


@pytest.fixture(scope="module")
def demo(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as scripts/demo.sh leaves it, with the tests' model."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(work.model, folder / "sft/hf")
    rows = work.prompts.read_text(encoding="utf-8").splitlines()
    for name, part in (("train", rows[:40]), ("heldout", rows[40:])):
        (folder / f"{name}.jsonl").write_text("".join(row + "\n" for row in part))
    return folder


def run(demo: Path, *flags: str, ranks: int = 1) -> list[float]:
    """The held-out scores that it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(EXAMPLE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--demo", str(demo), *flags], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[-1]) for line in done.stdout.splitlines() if "held out" in line]


@pytest.mark.extended
def test_two_ranks_train_what_one_does(demo: Path) -> None:
    one = run(demo, "--num-rollout", "3", *SMALL)
    two = run(demo, "--num-rollout", "3", *SMALL, "--tensor-model-parallel-size", "2", ranks=2)
    assert len(one) == 2 and one[0] == two[0]
    assert one[1] == pytest.approx(two[1], abs=0.05), "a token may turn where rounding differs"


def test_it_fits_in_250_lines_and_uses_the_public_names_only() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    imports = [line.strip() for line in text.splitlines() if "import" in line.split()]
    assert not [line for line in imports if line.startswith("from slime_like.")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_reaches_the_score_of_the_demo(tmp_path: Path) -> None:
    """From a model that is fine-tuned as the demo's is."""
    environment = {**os.environ, "OUTPUT": str(tmp_path / "demo"), "ROLLOUTS": "1", "LAYOUT": "one"}
    subprocess.run(
        ["bash", "scripts/demo.sh"],
        cwd=ROOT,
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
    )  # its last check fails: one rollout teaches nothing
    assert json.loads((tmp_path / "demo/sft/hf/config.json").read_text())["model_type"] == "qwen3"
    scores = run(tmp_path / "demo")
    assert scores[0] <= 0.45 and scores[-1] >= 0.8
