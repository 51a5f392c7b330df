"""A rollout of uneven samples, and loops over its tokens written from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slime_like.advantages import (
    AdvantageSettings,
    Outcomes,
    TokenAdvantages,
    estimate_advantages,
)

NAN, INF = math.nan, math.inf
LENGTHS = (6, 1, 9, 4, 0, 5, 3)
GROUPS = (2, 2, 0, 0, 0, 7, 7)
REWARDS = (1.0, 0.0, 0.5, -1.0, 2.0, 3.0, 0.25)


def samples(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Masks with tool spans, leading and trailing inactive tokens, one empty and one wholly masked
    response; and a KL for each token."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(n, generator=generator) > 0.4 for n in LENGTHS]
    masks[0][:] = torch.tensor([False, True, True, False, False, True])
    masks[3][:] = False
    masks[5][-2:] = False
    kl = [
        torch.where(m, torch.randn(m.numel(), generator=generator, dtype=torch.float64), 0.0)
        for m in masks
    ]
    return masks, kl


def outcomes(
    masks: Sequence[Tensor],
    rewards: Sequence[float] = REWARDS,
    greedy: Sequence[float] | None = None,
) -> Outcomes:
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
        lengths=torch.tensor([int(m.sum()) for m in masks]),
        greedy_rewards=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
    )


def critic_values(masks: Sequence[Tensor]) -> list[Tensor]:
    """A critic's, the same in every call; inactive tokens hold nothing usable."""
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randn(n, generator=generator) for n in LENGTHS]
    return [torch.where(mask, value, NAN) for mask, value in zip(masks, drawn)]


def energies_of(masks: Sequence[Tensor]) -> list[Tensor]:
    """The same in every call, as `critic_values`."""
    generator = torch.Generator().manual_seed(12)
    drawn = [torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [torch.where(mask, value, 0.0) for mask, value in zip(masks, drawn)]


def estimate(
    settings: AdvantageSettings,
    masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None = None,
    *,
    rewards: Sequence[float] = REWARDS,
    greedy: Sequence[float] | None = None,
) -> TokenAdvantages:
    values = critic_values(masks) if settings.estimator == "ppo" else None
    batch = outcomes(masks, rewards, greedy)
    if settings.estimator == "grpo_token":
        each = [
            math.isfinite(r) * mask * 0.5 * i for i, (r, mask) in enumerate(zip(rewards, masks))
        ]
        batch = replace(batch, token_rewards=each)
    return estimate_advantages(
        settings,
        batch,
        local_indices=range(len(masks)),
        masks=masks,
        kl=kl,
        critic_values=values,
        energies=energies_of(masks),
    )


def returns_by_loop(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> list[float]:
    """Sum over the active tokens s >= t of gamma^(active tokens between) R_s."""
    active = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for i, t in enumerate(active):
        result[t] = sum(gamma ** (j - i) * rewards[s] for j, s in enumerate(active) if j >= i)
    return result


def gae_by_loop(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[bool],
    gamma: float,
    lambd: float,
) -> tuple[list[float], list[float]]:
    """The recursion of the specification, over the full response."""
    advantage = following = 0.0
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * following - values[t]
            advantage = delta + gamma * lambd * advantage
            following = values[t]
            advantages[t], returns[t] = advantage, advantage + values[t]
    return advantages, returns


def flat(parts: Sequence[Tensor] | Sequence[list[float]]) -> list[float]:
    return [float(x) for part in parts for x in part]


def penalised(reward: float, mask: Tensor, kl: Tensor, coef: float) -> list[float]:
    """Rewards of tokens, by loop."""
    result = [-coef * float(kl[t]) if mask[t] else 0.0 for t in range(mask.numel())]
    active = [t for t in range(mask.numel()) if mask[t]]
    if active:
        result[active[-1]] += reward
    return result
