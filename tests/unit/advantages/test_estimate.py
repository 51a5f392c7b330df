"""What holds for every estimator: bad numbers, parts of a rollout, the KL in the reward."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.advantages import (
    AdvantageSettings,
    advantage_estimators,
    compute_advantages,
    estimate_advantages,
)
from tests.unit.advantages.token_cases import (
    GROUPS,
    INF,
    NAN,
    REWARDS,
    critic_values,
    estimate,
    outcomes,
    samples,
)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "opo", "gpg", "gdpo", "pass_at_k"])
def test_estimators_of_samples_take_the_kl_off_before_grouping(name: str) -> None:
    masks, kl = samples(6)
    got = estimate(AdvantageSettings(name, kl_coef=0.2), masks, kl)
    rewards = torch.tensor(
        [r - 0.2 * float(k.sum()) for r, k in zip(REWARDS, kl)], dtype=torch.float64
    )
    lengths = torch.tensor([int(m.sum()) for m in masks])
    expected = compute_advantages(
        name, rewards=rewards, group_ids=torch.tensor(GROUPS), lengths=lengths
    ).values
    for value, mask, number in zip(got.values, masks, expected):
        torch.testing.assert_close(value, torch.where(mask, number, 0.0))


@pytest.mark.parametrize("name", advantage_estimators.names())
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_reward_or_kl_leaves_the_others_alone(name: str, normalize: bool, bad: float) -> None:
    """Whether a sample's reward or its KL is broken, the rest is as if its mask were empty and its
    reward missing; it gets 0 itself."""
    masks, kl = samples(1)
    greedy = [0.5] * 7
    settings = AdvantageSettings(name, normalize=normalize, kl_coef=0.1)
    missing = [NAN if i == 2 else r for i, r in enumerate(REWARDS)]
    rewards = [bad if i == 2 else r for i, r in enumerate(REWARDS)]
    got = estimate(settings, masks, kl, rewards=rewards, greedy=greedy)
    expected = estimate(
        settings, [m & (i != 2) for i, m in enumerate(masks)], kl, rewards=missing, greedy=greedy
    )
    broken = [torch.where(m & (i == 2), bad, k) for i, (m, k) in enumerate(zip(masks, kl))]
    by_kl = estimate(settings, masks, broken, greedy=greedy)
    for i in range(7):
        torch.testing.assert_close(got.values[i], expected.values[i])
        torch.testing.assert_close(by_kl.values[i], expected.values[i])
    assert not got.values[2].any() and masks[2].any()
    assert got.metrics["reward/nonfinite"] == by_kl.metrics["reward/nonfinite"] == 1
    assert all(math.isfinite(v) for v in by_kl.metrics.values())
    with pytest.raises(ValueError, match="none of the 7 rewards"):
        estimate(settings, masks, kl, rewards=[NAN] * 7, greedy=greedy)


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_parts_of_a_rollout_give_what_the_whole_gives(name: str) -> None:
    """Ranks hold different samples of the same rollout; without whitening they need nothing of each
    other but the KL's sums. Two compare tokens across ranks: tests/dist/test_whitening.py."""
    if name in ("otb", "grpo_token"):
        return
    masks, _ = samples(2)
    settings, batch = AdvantageSettings(name, gamma=0.9), outcomes(masks, greedy=[0.5] * 7)
    critic = critic_values(masks)
    full = estimate_advantages(
        settings, batch, local_indices=range(7), masks=masks, critic_values=critic
    ).values
    for part in ([0, 3, 6], [5], [2, 1, 4]):
        some = [critic[i] for i in part]
        values = estimate_advantages(
            settings, batch, local_indices=part, masks=[masks[i] for i in part], critic_values=some
        ).values
        for i, value in zip(part, values):
            torch.testing.assert_close(value, full[i])
