"""GRPO of token rewards against a loop over tokens, in float64. Several ranks:
tests/dist/test_whitening.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.advantages import AdvantageSettings, estimate_advantages
from tests.unit.advantages.token_cases import GROUPS, flat, outcomes, samples


def by_loop(
    masks: Sequence[Tensor], rewards: Sequence[Tensor], gamma: float, *, by_std: bool
) -> list[list[float]]:
    """The t-th active tokens of a group against each other, then what is left of the response."""
    active = [mask.nonzero().flatten().tolist() for mask in masks]
    advantages = [[0.0] * mask.numel() for mask in masks]
    for i, places in enumerate(active):
        later = 0.0
        for place in reversed(range(len(places))):
            peers = [
                float(rewards[j][active[j][place]])
                for j in range(len(masks))
                if GROUPS[j] == GROUPS[i] and place < len(active[j])
            ]
            step = float(rewards[i][places[place]]) - statistics.fmean(peers)
            if by_std:
                step = step / (statistics.stdev(peers) + 1e-6) if len(peers) > 1 else 0.0
            later = step + gamma * later
            advantages[i][places[place]] = later
    return advantages


def token_rewards(masks: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.where(mask, torch.randint(0, 4, mask.shape, generator=generator) / 3.0, 0.0)
        for mask in masks
    ]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize(("gamma", "coef"), [(1.0, 0.0), (0.9, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_against_a_loop(by_std: bool, gamma: float, coef: float, seed: int) -> None:
    masks, kl = samples(seed)
    rewards = token_rewards(masks, seed)
    settings = AdvantageSettings("grpo_token", gamma=gamma, kl_coef=coef, normalize_std=by_std)
    batch = replace(outcomes(masks), token_rewards=rewards)
    got = estimate_advantages(settings, batch, local_indices=range(7), masks=masks, kl=kl)
    less_kl = [reward - coef * k for reward, k in zip(rewards, kl)]
    expected = by_loop(masks, less_kl, gamma, by_std=by_std)
    assert flat(got.values) == pytest.approx(flat(expected), rel=1e-5, abs=1e-6)
    assert any(flat(got.values))


def test_equal_rewards_give_exactly_nothing() -> None:
    masks, _ = samples(2)
    rewards = [mask * 0.1 for mask in masks]
    batch = replace(outcomes(masks), token_rewards=rewards)
    got = estimate_advantages(
        AdvantageSettings("grpo_token"), batch, local_indices=range(7), masks=masks
    )
    assert not any(flat(got.values))


def test_a_reward_of_the_whole_response_is_refused() -> None:
    masks, _ = samples(0)
    with pytest.raises(ValueError, match="grpo_token needs token rewards"):
        estimate_advantages(
            AdvantageSettings("grpo_token"), outcomes(masks), local_indices=range(7), masks=masks
        )
