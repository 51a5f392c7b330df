"""What is sampled while the trainer works teaches as much as what is sampled before: the first
starter's task in every mode of docs/en/asynchrony.md, within the same band."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.starters import held_out, train
from tests.learning.test_learning import SEEDS

AHEAD = "--async-rollout --tis-ratio-type token"
MODES = {
    "one ahead": AHEAD,
    "by sample, 4": f"{AHEAD} --fully-async --max-staleness 4",
    "by sample, 4, mask": f"{AHEAD} --fully-async --max-staleness 4 --stale-tokens mask",
    "by sample, 8": f"{AHEAD} --fully-async --max-staleness 8",
}


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_old_answers_teach_the_task(mode: str, seed: int, tmp_path: Path) -> None:
    """The band of `test_starter.py`, where nothing is old."""
    folder = tmp_path / "my_task"
    train(folder, "grpo", seed, MODES[mode])
    scores = [score for _, score in held_out(folder)]
    assert scores[0] <= 0.1 and scores[-1] >= 0.9, scores
