"""Runs that must learn: a model of random weights, a task, a band for the reward at the end (`make
test-learning`).

Seeds are those of LEARNING_SEEDS, `1` unless it is set. `python benchmarks/learning_table.py` makes
the table in docs/en/algorithms/results.md with the same recipes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.learning.recipes import RECIPES, Recipe, learn

SEEDS = [int(seed) for seed in os.environ.get("LEARNING_SEEDS", "1").split()]


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name.replace(", ", "-"))
def test_a_task_is_learned(recipe: Recipe, seed: int, tmp_path: Path) -> None:
    result = learn(recipe, seed, tmp_path)
    assert result.first <= recipe.start_at_most, result
    assert result.last >= recipe.end_at_least, result
