"""Numbers about a rollout: bad rewards are counted and left out, failures named, trainer and
sampler compared over active tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.guards.rollout import growth_warning
from slime_like.losses.mismatch import difference_by_place, train_rollout_difference
from slime_like.rollout.failures import failed_fraction, first_failure
from slime_like.rollout.metrics import rollout_metrics
from slime_like.types import Sample, SampleStatus


def make(
    sample_id: int,
    reward: float | None,
    length: int = 2,
    status: SampleStatus = SampleStatus.COMPLETED,
    **metadata: str,
) -> Sample:
    mask = torch.ones(length, dtype=torch.bool)
    return Sample(
        0,
        sample_id,
        torch.arange(length + 3),
        length,
        mask,
        None,
        reward,
        status,
        (sample_id,) * length,
        metadata=metadata,
    )


def test_rewards_that_are_not_finite_are_counted() -> None:
    samples = [
        make(3, 1.0),
        make(4, 0.0, 4),
        make(5, math.nan),
        make(6, math.inf, status=SampleStatus.TRUNCATED),
    ]
    metrics = rollout_metrics(samples)
    assert metrics["rollout/reward_mean"] == 0.5 and metrics["rollout/reward_std"] == 0.5
    assert metrics["rollout/reward_nonfinite"] == 2
    assert metrics["rollout/truncated_frac"] == 0.25
    assert (
        metrics["rollout/response_length_mean"] == 2.5
        and metrics["rollout/response_length_max"] == 4
    )
    assert metrics["rollout/tokens"] == 5 + 7 + 5 + 5
    assert metrics["rollout/weight_version_min"] == 3


def test_the_branches_of_an_episode_count() -> None:
    sample = make(0, 1.0, 2)
    branch = make(0, 1.0, 8, status=SampleStatus.TRUNCATED)
    metrics = rollout_metrics([sample], sequences=[sample, branch])
    assert metrics["rollout/tokens"] == 5 + 11
    assert metrics["rollout/response_length_mean"] == 5
    assert metrics["rollout/response_length_max"] == 8
    assert metrics["rollout/truncated_frac"] == 0.5
    assert metrics["rollout/reward_nonfinite"] == 0 and metrics["rollout/reward_mean"] == 1


def test_a_rollout_without_a_reward_has_no_mean() -> None:
    metrics = rollout_metrics([make(0, None), make(1, math.nan)])
    assert metrics["rollout/reward_nonfinite"] == 2
    assert "rollout/reward_mean" not in metrics


def test_failures() -> None:
    samples = [
        make(0, 1.0),
        make(1, None, status=SampleStatus.FAILED, failure="took too long"),
        make(2, None, status=SampleStatus.ABORTED),
    ]
    assert failed_fraction(samples) == pytest.approx(2 / 3)
    assert first_failure(samples) == "sample 1: took too long"
    assert first_failure(samples[2:]) == "sample 2: aborted by the engine"


def test_trainer_against_sampler() -> None:
    old = [torch.tensor([-1.0, -2.0, 99.0]), torch.tensor([-3.0])]
    rollout = [torch.tensor([-1.1, -2.0, math.nan]), torch.tensor([-2.7])]
    masks = [torch.tensor([True, True, False]), torch.tensor([True])]
    metrics = train_rollout_difference(old, rollout, masks, None)
    assert metrics["rollout/train_rollout_log_prob_diff_mean"] == pytest.approx(0.4 / 3, rel=1e-5)
    assert metrics["rollout/train_rollout_log_prob_diff_max"] == pytest.approx(0.3, rel=1e-5)
    assert metrics["rollout/token_ratio_error"] == pytest.approx(
        (math.exp(0.1) + 1 + math.exp(0.3)) / 3, rel=1e-5
    )
    assert metrics["rollout/log_probs_nonfinite"] == 0


def test_log_probs_that_are_not_finite_are_not_hidden() -> None:
    metrics = train_rollout_difference(
        [torch.tensor([-1.0, -2.0])],
        [torch.tensor([-1.0, math.nan])],
        [torch.ones(2, dtype=torch.bool)],
        None,
    )
    assert math.isnan(metrics["rollout/train_rollout_log_prob_diff_mean"])
    assert metrics["rollout/log_probs_nonfinite"] == 0.5


def test_the_difference_by_depth_of_context_and_by_position() -> None:
    """A prompt of 1,000 tokens: the response's tokens from the 24th on are beyond 1,024."""
    old = [torch.zeros(300), torch.zeros(10)]
    rollout = [torch.full((300,), 0.1), torch.full((10,), 0.1)]
    rollout[0][24:] = 0.5
    masks = [torch.ones(300, dtype=torch.bool), torch.ones(10, dtype=torch.bool)]
    masks[0][299] = False
    found = difference_by_place(old, rollout, masks, [1000, 5], None)
    assert found == pytest.approx(
        {
            "rollout/log_prob_diff_context_below_1024": 0.1,
            "rollout/log_prob_diff_context_below_4096": 0.5,
            "rollout/log_prob_diff_response_below_256": (34 * 0.1 + 232 * 0.5) / 266,
            "rollout/log_prob_diff_response_below_1024": 0.5,
        },
        rel=1e-5,
    )
    assert difference_by_place(old[1:], rollout[1:], masks[1:], [5], None) == {}


def test_a_difference_that_grows_is_a_warning() -> None:
    grows = {
        "rollout/log_prob_diff_context_below_1024": 0.001,
        "rollout/log_prob_diff_context_below_4096": 0.002,
        "rollout/log_prob_diff_context_from_65536": 0.05,
    }
    warning = growth_warning(grows, 0.1)
    assert warning is not None and "grows with the depth of the context: 0.001 in" in warning
    assert growth_warning(grows, 10.0) is None, "rounding"
    assert growth_warning({name: 0.05 for name in grows}, 0.1) is None
    along = {
        "rollout/log_prob_diff_response_below_256": 0.0,
        "rollout/log_prob_diff_response_from_16384": 0.02,
    }
    assert "the position in the response" in str(growth_warning(along, 0.1))
