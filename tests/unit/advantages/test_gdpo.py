"""Rewards of several parts: GDPO against a loop over parts, groups and the rollout, in float64, and
how the parts reach all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slime_like.advantages import (
    AdvantageOutput,
    AdvantageSettings,
    Outcomes,
    RewardParts,
    advantage_estimators,
    compute_advantages,
    estimate_advantages,
)
from slime_like.batching.outcomes import reward_parts
from slime_like.types import Sample, SampleStatus

NAN = math.nan
GROUPS = [3, 1, 3, 1, 3, 1, 1, -4, -4, 8]  # uneven, interleaved, and one alone
# correct, length, format: of other sizes, one the same in a whole group, one that some do not have
PARTS = [
    [1.0, 310.0, 0.0],
    [0.0, 250.0, 1.0],
    [0.0, 900.0, 0.0],
    [0.0, 251.0, NAN],
    [1.0, 20.0, 0.0],
    [0.0, 700.0, 1.0],
    [0.0, 250.0, 0.5],
    [1.0, 5.0, 1.0],
    [1.0, 5.0, 1.0],
    [1.0, 7.0, 0.0],
]
WEIGHTS = (1.0, -0.25, 0.5)


def compute(rewards: Sequence[float], **settings: Any) -> AdvantageOutput:
    parts = settings.pop("parts", PARTS)
    return compute_advantages(
        "gdpo",
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
        lengths=torch.ones(10, dtype=torch.int64),
        parts=RewardParts(torch.tensor(parts, dtype=torch.float64), WEIGHTS),
        **{"singleton": "reward", **settings},
    )


def by_loop(rewards: Sequence[float]) -> list[float]:
    """A sample without a finite reward is left out of everything, one without a part out of it."""
    usable = [i for i in range(10) if math.isfinite(rewards[i])]
    sums = [0.0] * 10
    for k, weight in enumerate(WEIGHTS):
        for i in usable:
            peers = [
                PARTS[j][k] for j in usable if GROUPS[j] == GROUPS[i] and math.isfinite(PARTS[j][k])
            ]
            if math.isfinite(PARTS[i][k]) and len(peers) > 1:
                spread = statistics.stdev(peers) + 1e-6
                sums[i] += weight * (PARTS[i][k] - statistics.mean(peers)) / spread
    mean = statistics.mean(sums[i] for i in usable)
    spread = statistics.stdev(sums[i] for i in usable) + 1e-6
    return [(sums[i] - mean) / spread if i in usable else 0.0 for i in range(10)]


@pytest.mark.parametrize("broken", [(), (4,), (0, 6)])
def test_gdpo_is_the_formula(broken: tuple[int, ...]) -> None:
    rewards = [NAN if i in broken else part[0] for i, part in enumerate(PARTS)]
    output = compute(rewards, singleton="zero") if 9 in broken else compute(rewards)
    expected = by_loop(rewards)
    expected[9] = rewards[9]  # alone: the reward itself, as asked for
    assert output.values.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert output.values[7:9].tolist() == [0, 0], "all parts are equal there"
    assert output.metrics == {
        "reward/nonfinite": len(broken),
        "reward/zero_spread_group_frac": 0.25,
        "reward/singleton_groups": 1,
    }


def test_mixtures_that_grpo_takes_for_one_stay_apart() -> None:
    """The paper's figure 2, two rewards of 0 or 1. GRPO gives both groups 0.7071; GDPO 0.7071 and
    1.4142, here divided by their standard deviation sqrt(5 / 3)."""
    parts = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 1]], dtype=torch.float64)
    samples: dict[str, Any] = dict(
        rewards=parts.sum(1), group_ids=torch.tensor([0, 0, 1, 1]), lengths=torch.ones(4).long()
    )
    grpo = compute_advantages("grpo", **samples).values.tolist()
    assert grpo == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, rel=1e-5)
    gdpo = compute_advantages("gdpo", **samples, parts=RewardParts(parts, (1.0, 1.0)))
    over = (5 / 3) ** 0.5
    expected = [-(0.5**0.5) / over, 0.5**0.5 / over, -(2**0.5) / over, 2**0.5 / over]
    assert gdpo.values.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_numbers_of_trl() -> None:
    """Those of its normalize_then_sum (July 2026), which adds 1e-4 to standard deviations."""
    parts = [[1, 310, 0], [0, 250, 1], [0, 900, 0], [1, 20, 0.5], [0, 700, 1], [1, 5, 1]]
    values = torch.tensor(parts, dtype=torch.float64)
    found = compute_advantages(
        "gdpo",
        rewards=values[:, 0],
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        lengths=torch.ones(6, dtype=torch.int64),
        parts=RewardParts(values, WEIGHTS),
    ).values
    expected = [1.01784659, 0.16954573, -1.18739232, 0.14378792, -1.18842884, 1.04464093]
    assert found.tolist() == pytest.approx(expected, abs=3e-4)


def test_the_scale_of_a_part_does_not_matter() -> None:
    rewards = [part[0] for part in PARTS]
    larger = [[a, 1e4 * b + 3, c] for a, b, c in PARTS]
    torch.testing.assert_close(
        compute(rewards, parts=larger).values, compute(rewards).values, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_other_estimators_refuse_parts(name: str) -> None:
    if name == "gdpo":
        return
    outcomes = Outcomes(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        lengths=torch.tensor([1, 1]),
        parts=RewardParts(torch.ones(2, 1), (1.0,)),
    )
    masks = [torch.ones(1, dtype=torch.bool)] * 2
    with pytest.raises(ValueError, match=f"{name} takes one reward per response"):
        estimate_advantages(AdvantageSettings(name), outcomes, local_indices=range(2), masks=masks)


def test_parts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for 2 weights"):
        RewardParts(torch.ones(2, 3), (1.0, 1.0))
    with pytest.raises(ValueError, match=r"shape \(9, 3\) for 10 rewards"):
        compute([0.0] * 10, parts=PARTS[:9])


def sample(i: int, reward: float | None, **details: float) -> Sample:
    return Sample(
        sample_id=i,
        group_id=0,
        tokens=torch.tensor([1, 2]),
        response_length=1,
        loss_mask=torch.tensor([True]),
        status=SampleStatus.COMPLETED,
        reward=reward,
        metadata={"reward_details": details} if details else {},
    )


def test_parts_are_read_from_what_the_reward_function_returned() -> None:
    samples = [
        sample(0, 1.0, length=3.0, format=0.0),
        sample(1, 0.5, length=4.0),
        sample(2, None),
        sample(3, NAN, format=1.0),
    ]
    found = reward_parts(["score", "length", "format"], [1.0, 2.0, 3.0], "score", samples)
    expected = torch.tensor(
        [[1.0, 3.0, 0.0], [0.5, 4.0, NAN], [NAN, NAN, NAN], [NAN, NAN, 1.0]], dtype=torch.float64
    )
    torch.testing.assert_close(found.values, expected, rtol=0, atol=0, equal_nan=True)
    assert found.weights == (1.0, 2.0, 3.0)


def test_a_key_that_nobody_has_is_named() -> None:
    with pytest.raises(
        ValueError, match="no sample of this rollout has a finite number under lenght"
    ):
        reward_parts(["score", "lenght"], [1.0, 1.0], "score", [sample(0, 1.0, length=2.0)])
