"""Scores of evaluation sets: pass@k against counting, and samples that could not be scored."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
import torch

from arguments.eval_sets import EvalSet
from arguments.schema import RewardConfig, RolloutConfig
from slime_like.rollout.evaluate import Evaluator, pass_at_k, reward_of, score
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus


def group(
    group_id: int, rewards: list[float | None], status: SampleStatus = SampleStatus.COMPLETED
) -> SampleGroup:
    mask = torch.ones(2, dtype=torch.bool)
    samples = [
        Sample(group_id, 100 * group_id + j, torch.arange(5), 2, mask, reward=reward, status=status)
        for j, reward in enumerate(rewards)
    ]
    return SampleGroup(group_id, tuple(samples))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n: int) -> None:
    for c in range(n + 1):
        results = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(results, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_scores_of_a_set() -> None:
    metrics = score(
        "words",
        [group(0, [1.0, 0.0, 0.0, 0.5]), group(1, [1.0, 1.0, 2.0, 0.0], SampleStatus.TRUNCATED)],
    )
    assert metrics["eval/words/mean"] == pytest.approx(5.5 / 8)
    assert metrics["eval/words/pass@1"] == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert metrics["eval/words/pass@2"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/words/pass@4"] == 1.0
    assert metrics["eval/words/truncated_frac"] == 0.5
    assert metrics["eval/words/response_length_mean"] == 2.0
    assert "eval/words/pass@8" not in metrics


def test_what_has_no_score_counts_as_failed() -> None:
    metrics = score("words", [group(0, [None, 1.0]), group(1, [math.nan, math.inf])])
    assert metrics["eval/words/mean"] == 0.25
    assert metrics["eval/words/pass@1"] == 0.25
    assert metrics["eval/words/unscored_frac"] == 0.75


def test_an_evaluation_that_cannot_be_scored_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The score alone, 0.25, looks like wrong answers."""

    class Rollouter:
        group = None  # of collectives

        def generate(self, *args: object, **options: object) -> list[SampleGroup]:
            return [group(0, [None, 1.0]), group(1, [math.nan, math.inf])]

    words = EvalSet("words", "words.jsonl", n_samples_per_eval_prompt=2)
    evaluator = Evaluator(
        cast(Any, Rollouter()), [words], {"words": []}, RolloutConfig(), RewardConfig()
    )
    with caplog.at_level("WARNING"):
        assert evaluator.evaluate(4)["eval/words/mean"] == 0.25
    assert caplog.messages == [
        "evaluation 5, words: 3 of 4 samples have no usable response or reward and count as 0; the "
        "first: sample 0: its reward is None"
    ]


def test_a_standard_set_has_its_reward_and_the_time_for_it() -> None:
    run = RewardConfig(custom_rm_path="mine.py:score", rm_timeout_s=10.0)
    slow = EvalSet("lcb", "test6.jsonl", set="livecodebench", rm_type="code")
    assert (found := reward_of(slow, run)) is not None
    assert (found.rm_type, found.custom_rm_path, found.rm_timeout_s) == ("code", None, 300.0)
    patient = RewardConfig(rm_type="math", rm_timeout_s=600.0)
    assert (found := reward_of(slow, patient)) is not None and found.rm_timeout_s == 600.0
    other = EvalSet("mine", "mine.jsonl", rm_type="code")
    assert (found := reward_of(other, run)) is not None and found.rm_timeout_s == 10.0
