"""What is sampled while the trainer works teaches the first starter's task, in the modes of
docs/en/asynchrony.md, which has the curves of three to six seeds. A bound of 8 is none of them: at this
learning rate the loss does not stand it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learning.starters import held_out, train
from tests.learning.test_learning import SEEDS

AHEAD = "--async-rollout --tis-ratio-type token"
# flags, and the score that the held-out rows must have at the end; 0.9 is that of `test_starter.py`,
# where nothing is old
MODES = {
    "one ahead": (AHEAD, 0.8),
    "by sample, 1": (f"{AHEAD} --fully-async --max-staleness 1", 0.95),
    "by sample, 4": (f"{AHEAD} --fully-async --max-staleness 4", 0.95),
    "by sample, 4, mask": (f"{AHEAD} --fully-async --max-staleness 4 --stale-tokens mask", 0.85),
}


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_old_answers_teach_the_task(mode: str, seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "my_task"
    flags, band = MODES[mode]
    train(folder, "grpo", seed, flags)
    scores = [score for _, score in held_out(folder)]
    assert scores[0] <= 0.1 and scores[-1] >= band, scores
