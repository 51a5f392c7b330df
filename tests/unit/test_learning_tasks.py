"""The data and the reward of the learning tests, which themselves run outside `make test`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from arguments.parse import parse_args
from tests.learning.recipes import RECIPES, Recipe, command
from tests.learning.rewards import (
    VOCABULARY,
    digit_completion,
    digit_rewards,
    right_prefix,
    score,
)
from tests.learning.tasks import TASKS, write_task


def test_digits_continue_the_sequence() -> None:
    rows = list(TASKS["digits"]())
    assert len(rows) == 1000  # 10 first numbers, 10 differences, 10 lengths
    pairs = dict(rows)
    assert len(pairs) == 900  # differences of 0 and 9 are the same
    assert pairs["1,3:9,3S"] == "5,7,0"
    assert pairs["4,2:9,4S"] == "0,7,5,3"
    assert pairs["9,0:9,2S"] == "0,0"
    assert pairs["5,5:9,0S"] == ""


def test_our_tasks() -> None:
    assert dict(TASKS["copy"]())["407:"] == "407"
    largest = dict(TASKS["largest"]())
    assert largest["3,7,2:"] == "7"
    assert sum(label == "9" for label in largest.values()) / len(largest) == pytest.approx(0.271)


@pytest.mark.parametrize(
    ("response", "ended", "reward"),
    [
        ("1,2", True, 1.0),
        ("1,2", False, 0.75),
        ("1,", True, 0.5),
        ("1,3", True, 0.5),
        ("1,2,3", True, 0.75),
        ("2,2", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_the_reward_counts_up_to_the_first_mistake(
    response: str, ended: bool, reward: float
) -> None:
    assert score(response, "1,2", ended=ended) == reward
    sample = SimpleNamespace(
        response=response, label="1,2", status="completed" if ended else "truncated"
    )
    assert right_prefix(None, sample) == reward


def test_an_empty_answer_is_right_where_nothing_is_asked() -> None:
    assert score("", "", ended=True) == 1.0
    assert score("1", "", ended=True) == 0.0


@pytest.mark.parametrize(
    ("response", "ended", "rewards"),
    [
        ("1,2", True, [0.25, 0.25, 0.25, 0.25]),
        ("1,2", False, [0.25, 0.25, 0.25]),
        ("1", True, [0.25, 0.25]),  # the end has what the character before it has
        ("1,3", True, [0.25, 0.25, 0.0, 0.0]),
        ("1,2,3", True, [0.25, 0.25, 0.25, 0.0, 0.0, 0.0]),
        ("2,2", True, [0.0, 0.0, 0.0, 0.0]),
        ("P1", True, [0.0, 0.0, 0.0]),  # a token that is no text is a mistake
        ("", True, [0.0]),
    ],
)
def test_digit_completion_pays_token_by_token(
    response: str, ended: bool, rewards: list[float]
) -> None:
    assert digit_rewards(response, "1,2", ended=ended) == rewards
    tokens = [VOCABULARY.index(character) for character in response + "E" * ended]
    sample = SimpleNamespace(
        tokens=[5, 15, *tokens],  # after a prompt
        response_length=len(tokens),
        label="1,2",
        status="completed" if ended else "truncated",
    )
    assert digit_completion(None, sample) == rewards


def test_digit_completion_where_nothing_is_asked() -> None:
    assert digit_rewards("", "", ended=True) == [1.0]
    assert digit_rewards("1", "", ended=True) == [0.0, 0.0]


@pytest.mark.parametrize("task", TASKS)
def test_files_of_a_task(task: str, tmp_path: Path) -> None:
    write_task(tmp_path, task, 1, num_layers=1)
    parts = [
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    ]
    prompts = [{row["prompt"] for row in part} for part in parts]
    assert len(parts[0]) == pytest.approx(4 * len(parts[1]), abs=4)
    assert task == "digits" or not prompts[0] & prompts[1]  # it has prompts twice, as verl's has
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = parts[0][0]
    ids = tokenizer(row["prompt"])["input_ids"]
    assert len(ids) == len(row["prompt"])
    assert tokenizer.decode(ids) == row["prompt"]
    assert tokenizer.convert_ids_to_tokens(list(range(16))) == list(VOCABULARY)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_recipes_are_right_command_lines(recipe: Recipe, tmp_path: Path) -> None:
    write_task(tmp_path, recipe.task, 1, num_layers=recipe.num_layers)
    config = parse_args(command(recipe, 1, tmp_path)[2:], world_size=1)
    assert config.rollout.num_rollout is not None
    assert config.rollout.num_rollout <= 200  # what verl's own test has
