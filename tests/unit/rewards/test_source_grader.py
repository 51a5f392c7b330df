"""Each sample of a mix is graded by the reward of its source."""

from __future__ import annotations

from typing import Any

import torch

from slime_like.rewards.grader import Grader
from slime_like.rewards.source_grader import SourceGrader
from slime_like.types import PROMPT_SOURCE, Sample


def sample(number: int, source: str | None, response: str, **metadata: Any) -> Sample:
    origin = {} if source is None else {PROMPT_SOURCE: {"name": source, "row": 0, "epoch": 0}}
    return Sample(
        group_id=number,
        sample_id=number,
        tokens=torch.tensor([1, 2]),
        response_length=1,
        loss_mask=torch.ones(1, dtype=torch.bool),
        response=response,
        label="x y",
        metadata={**metadata, **origin},
    )


def test_rewards_by_source_in_order_and_counted_together() -> None:
    samples = [sample(i, name, "x") for i, name in enumerate(["a", "b", None, "a", "other"])]
    with SourceGrader(
        {"a": Grader(rm_type="f1"), "b": Grader(rm_type="zero")},
        rm_type="exact_match",
        rm_num_workers=1,
    ) as grader:
        graded = grader.grade(samples)
        assert [s.sample_id for s in graded] == [0, 1, 2, 3, 4]
        f1 = graded[0].reward
        assert f1 is not None and 0 < f1 < 1
        assert [s.reward for s in graded] == [f1, 0.0, 0.0, f1, 0.0]
        assert grader.last_counts["graded"] == 5
        assert [s.reward for s in grader.grade(samples[:2])] == [f1, 0.0]
        assert grader.last_counts["graded"] == 2, "not those of the call before"


def test_a_run_whose_sources_all_have_a_reward_needs_none() -> None:
    with SourceGrader({"a": Grader(rm_type="exact_match", rm_num_workers=1)}) as grader:
        assert [s.reward for s in grader.grade([sample(0, "a", "x y")])] == [1.0]
