"""Every recipe of scripts/recipes: its run file is a command line without a problem, and its job
fits as its README says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_patches

megatron_patches.apply()

from arguments.parse import parse_args  # noqa: E402
from slime_like.preflight.check import check  # noqa: E402
from tests.paths import ROOT  # noqa: E402

FOLDER = ROOT / "scripts/recipes"
RECIPES = sorted(path.parent.name for path in FOLDER.glob("*/run.yaml"))
ROWS = ROOT / "tests/data/gsm8k/train.jsonl"
CHECKPOINTS = json.loads((ROOT / "tests/unit/arguments/slime_scripts.json").read_text())[
    "checkpoints"
]
CHECKPOINTS["Qwen3-0.6B"] = {
    **CHECKPOINTS["Qwen3-4B"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16,
}  # fmt: skip
SMALLEST = "gsm8k_qwen3_0.6b"
WITHIN = 0.02  # of the memory that a README names


def settings_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name / "run.yaml").read_text())
    return found


def example_rows(name: str) -> Path:
    own = FOLDER / name / "rows.jsonl"
    return own if own.exists() else ROWS


def write_inputs(folder: Path, name: str) -> None:
    """The models and data that a run file names, as far as it is looked at before a job."""
    settings = settings_of(name)
    for key in ("hf_checkpoint", "opd_teacher_load"):
        if path := settings.get(key):
            (folder / path).mkdir(parents=True)
            config = CHECKPOINTS[Path(path).name]
            (folder / path / "config.json").write_text(json.dumps(config))
    for path in (settings["prompt_data"], *settings.get("eval_prompt_data", ["x"])[1:]):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(example_rows(name))
    for part in ("scripts", "examples"):
        (folder / part).symlink_to(ROOT / part)


def nodes_and_gpus(name: str) -> list[int]:
    text = (FOLDER / name / "train.sbatch").read_text()
    return [int(n) for n in re.findall(r"^#SBATCH --(?:nodes|gpus-per-node)=(\d+)$", text, re.M)]


def test_there_are_seven() -> None:
    assert len(RECIPES) == 7


@pytest.mark.parametrize(
    "name",
    [
        name if name == SMALLEST else pytest.param(name, marks=pytest.mark.extended)
        for name in RECIPES
    ],
)
def test_a_recipe_starts_and_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    nodes, gpus = nodes_and_gpus(name)
    job = ["--preflight", "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    config = parse_args(["--config", f"scripts/recipes/{name}/run.yaml", *job], 1)
    found = check(config)
    assert found.fits, found.verdict
    text = (FOLDER / name / "README.md").read_text()
    promised = re.search(r"a GPU needs ([\d.]+) GB", text)
    assert promised is not None
    assert found.heaviest.peak / 1e9 == pytest.approx(float(promised[1]), rel=WITHIN)
