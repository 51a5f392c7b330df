"""Every recipe of scripts/examples trains: one rollout of the tiny model, with the script's own
command line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.unit.scripts.test_example_command_lines import RECIPES, call


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[0], *(pytest.param(r, marks=pytest.mark.extended) for r in RECIPES[1:])],
)
def test_a_recipe_trains(server: TrainServer, work: Workspace, tmp_path: Path, recipe: str) -> None:
    start = tmp_path / "warm_start"
    (start / "data").mkdir(parents=True)
    (start / "sft").mkdir()
    (start / "sft/hf").symlink_to(work.model)
    (start / "sft/done").touch()
    for name in ("train.jsonl", "heldout.jsonl"):
        (start / "data" / name).symlink_to(work.prompts)
    out = tmp_path / "out"
    small = "--num-rollout 1 --rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 4 --lr-warmup-iters 0 --eval-interval 9"
    reward = f"--custom-rm-path {work.reward}:letters --rm-num-workers 1 --skip-eval-before-train --no-tensorboard --no-progress --no-plot"
    if recipe in ("ppo", "sao"):
        small += " --num-critic-only-steps 0"
    argv = call(
        recipe,
        tmp_path,
        *small.split(),
        *reward.split(),
        WORK=str(start),
        OUTPUT=str(out),
        MODEL="",
    )
    server.train(argv, tmp_path / "log").ok()
    (row,) = (row for row in rows_of(out) if "train/loss" in row)
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 1e-3
    assert (out / "hf/model.safetensors").is_file()
