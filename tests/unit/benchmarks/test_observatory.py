"""The observatory of losses and staleness: its task, its ages, its page."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import observatory
from slime_like.cli.new import write_project
from slime_like.import_utils import load_function
from tests.paths import ROOT


def test_a_score_is_the_starters(tmp_path: Path) -> None:
    """Every answer of up to four tokens to one letter, against the reward that `slime-like new`
    writes."""
    write_project(tmp_path / "task", None, "grpo")
    score = load_function(f"{tmp_path}/task/reward.py:score", "--custom-rm-path")
    letters = "abcdefgh"
    answers = list(itertools.product((2, 5, observatory.END), repeat=observatory.LENGTH))
    found = observatory.grade(torch.tensor([answers]), torch.full((1, len(answers)), 8 + 2))[0]
    for answer, given in zip(answers, found.tolist(), strict=True):
        ended = observatory.END in answer
        end = answer.index(observatory.END) if ended else len(answer)
        text = "".join(letters[token] for token in answer[:end])
        assert given == pytest.approx(score(text, "cc", ended=ended)), answer


def test_answers_are_of_weights_of_exactly_that_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the run is that old, of the first ones."""
    seen: list[torch.Tensor] = []
    trained: list[torch.Tensor] = []
    sample, score = observatory.sample, observatory.score

    def sampling(weights: observatory.Weights, prompts: torch.Tensor, *others: Any) -> Any:
        if prompts.shape[1] != 32:  # no evaluation
            seen.append(weights[2].clone())
        return sample(weights, prompts, *others)

    def scoring(weights: observatory.Weights, *others: Any) -> Any:
        trained.append(weights[2].detach().clone())
        return score(weights, *others)

    monkeypatch.setattr(observatory, "sample", sampling)
    monkeypatch.setattr(observatory, "score", scoring)
    monkeypatch.setattr(observatory, "EVALUATED", 1)
    monkeypatch.setattr(observatory, "PROMPTS", 2)
    observatory.train(observatory.SETTINGS[0], 2, 10)
    assert len(seen) == len(trained) == 10
    for step in range(10):
        assert torch.equal(seen[step], trained[max(0, step - 2)])
    assert not torch.equal(trained[0], trained[1])


def test_a_seed_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observatory, "EVALUATED", 2)
    for setting in observatory.SETTINGS:
        monkeypatch.setattr(observatory, "SEEDS", (1, 2, 3, 4, 5))
        together = observatory.train(setting, 1, 10).scores
        monkeypatch.setattr(observatory, "SEEDS", (4,))
        assert observatory.train(setting, 1, 10).scores == pytest.approx(together[3:4], abs=0.02)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_has_every_line(language: str) -> None:
    page = (ROOT / "docs" / language / "observatory.md").read_text(encoding="utf-8")
    for setting in observatory.SETTINGS:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {setting.label} |"))
        assert line.count("±") == len(observatory.STALENESS)
