"""Recipes of tinker-cookbook that need no download, unmodified and with their own losses: each makes
two steps. What they sample is babbling, so rewards say nothing here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cookbook.conftest import Cookbook
from tests.cookbook.test_loops import HUB_NAME, column, write
from tests.e2e.api_server import ApiServer

SMALL = {"batch_size": 2, "group_size": 4, "max_tokens": 4}
GROUPS = {"group_size": 4, "groups_per_batch": 4}
# a recipe's settings; by default all three sample for stable_reinforce
RECIPES = {
    "math_rl": GROUPS,
    "math_rl, ahead": {**GROUPS, "max_steps_off_policy": 1},
    "rubric": {
        "renderer_name": "role_colon",
        "grader_llm_name": HUB_NAME,
        "grader_renderer_name": "role_colon",
        "train_group_size": 2,
        "groups_per_batch": 2,
        "max_tokens": 4,
        "eval_every": 0,
    },
    "preference.shorter": {"renderer_name": "role_colon", **SMALL},
    "multiplayer_rl.guess_number": {"renderer_name": "role_colon", **SMALL, "eval_every": 0},
    "preference.dpo": {"renderer_name": "role_colon", "batch_size": 8},
}


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the demo's model, with room for long prompts, and data have their hub names."""
    place = tmp_path_factory.mktemp("recipes")
    shutil.copytree(demo / "model", place / HUB_NAME)
    file = place / HUB_NAME / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {word}\n\nAssistant: {word}",
            "rejected": f"\n\nHuman: Say {word}\n\nAssistant: no {word}",
        }
        for word in ("one", "two", "red", "blue")
    ]
    for split in ("train", "test"):
        write(place / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pairs * 8)
    (place / "tinker_cookbook" / "example_data").mkdir(parents=True)
    return place


@pytest.fixture(scope="module")
def server(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    folder = tmp_path_factory.mktemp("server")
    with ApiServer(place / HUB_NAME, folder, "--served-model-name", HUB_NAME) as server:
        yield server


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(
    name: str, place: Path, server: ApiServer, cookbook: Cookbook, tmp_path: Path
) -> None:
    recipe = f"tinker_cookbook.recipes.{name.split(',')[0]}"
    if name == "rubric":
        cookbook("-m", f"{recipe}.generate_data", folder=place)
    log = tmp_path / "log"
    given = {"model_name": HUB_NAME, "log_path": log, "max_steps": 2, **RECIPES[name]}
    settings = (f"{key}={value}" for key, value in given.items())
    cookbook("-m", f"{recipe}.train", *settings, folder=place, url=server.url)
    assert len(column(log, "dpo_loss" if name == "preference.dpo" else "optim/lr")) == 2
    if name != "preference.dpo":
        assert max(map(abs, column(log, "optim/kl_sample_train_v2"))) < 1e-4


def test_a_decision(place: Path, server: ApiServer, cookbook: Cookbook) -> None:
    """recipes.decisions reads probabilities of answers from prompt log-probs."""
    recipe = ("-m", "tinker_cookbook.recipes.decisions.demo", f"model_name={HUB_NAME}")
    printed = cookbook(*recipe, folder=place, url=server.url, typed="Does it run?\n")
    probabilities = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-3)
