"""GRPO on token rewards, for reward functions that judge parts of a response: process supervision
of DeepSeekMath, arXiv 2402.03300, section 4.1.3, with one step per token. Rewards are compared at
the same position of the response, as in MT-GRPO, arXiv 2505.11821, so that the length of a response
does not change its baseline:

    r~_t = (R_t - mean_t) / (std_t + 1e-6)      over responses of the group with t active tokens
    A_t  = sum_{s >= t} gamma^(s-t) r~_s

R_t is the reward of the t-th active token minus its KL penalty; std has Bessel's correction. r~_t
is 0 if only one response has that position, or if all rewards are equal.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.returns import discounted_returns, scatter_active, token_rewards
from slime_like.lazy import Tensor, torch

ROUNDING = 1e-14  # relative rounding error of a mean of equal numbers


@register_token_estimator(
    "grpo_token", takes_token_rewards=True, needs_peers=True, scales_by_std=True
)
def grpo_token(batch: TokenRewards) -> list[Tensor]:
    """A_t = r~_t + gamma A_next over active tokens, [R] per sample. Collective over the ranks that
    share the rollout."""
    peers = batch.peers
    of_tokens = batch.token_rewards or [None] * len(batch.masks)
    if peers is None:
        raise ValueError("--advantage-estimator grpo_token needs the groups of the rollout (peers)")
    if any(valid and rewards is None for valid, rewards in zip(peers.valid, of_tokens)):
        raise ValueError(
            "--advantage-estimator grpo_token needs token rewards, and the reward function "
            "returned one for the response; return one per token, or use grpo"
        )
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, of_tokens)
    active = [reward[mask] for reward, mask in zip(rewards, batch.masks)]

    def sum_by_position(values: list[Tensor]) -> Tensor:
        """[groups, positions]: sums over the valid responses of all ranks."""
        sums = torch.zeros(peers.num_groups, peers.max_length, dtype=torch.float64)
        for value, group, valid in zip(values, peers.group_index, peers.valid):
            if valid:
                sums[group, : value.numel()] += value
        return peers.all_reduce(sums)

    counts = sum_by_position([torch.ones_like(reward) for reward in active])
    mean = sum_by_position(active) / counts.clamp(min=1)
    centred = []
    for reward, group in zip(active, peers.group_index):
        baseline = mean[group, : reward.numel()]
        gap = reward - baseline
        centred.append(torch.where(gap.abs() <= ROUNDING * baseline.abs(), 0.0, gap))
    if batch.normalize_std:
        std = (sum_by_position([gap**2 for gap in centred]) / (counts - 1).clamp(min=1)).sqrt()
        for k, (gap, group) in enumerate(zip(centred, peers.group_index)):
            centred[k] = gap / (std[group, : gap.numel()] + EPS)
    steps = [scatter_active(gap, mask) for gap, mask in zip(centred, batch.masks)]
    return discounted_returns(steps, batch.masks, batch.gamma)
