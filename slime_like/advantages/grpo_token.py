"""GRPO of token rewards, for reward functions that judge parts of a response: process supervision of
DeepSeekMath, arXiv 2402.03300, section 4.1.3, where each token is a step. Rewards are compared at the
same place of the response, as in MT-GRPO, arXiv 2505.11821, and not over all places at once, so that
a long response does not differ from a short one by the sum of so many means:

    r~_t = (R_t - mean_t) / (std_t + 1e-6)      over the group's responses that have a t-th active token
    A_t  = sum_{s >= t} gamma^(s-t) r~_s

R_t is the reward of the t-th active token less its KL penalty; std has Bessel's correction. Where one
response is left, and where all rewards are equal, r~_t is 0.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.returns import discounted_returns, token_rewards
from slime_like.lazy import Tensor, torch

ROUNDING = 1e-14  # of a mean of equal numbers, over their size


@register_token_estimator(
    "grpo_token", takes_token_rewards=True, needs_peers=True, scales_by_std=True
)
def grpo_token(batch: TokenRewards) -> list[Tensor]:
    """A collective of the ranks that share the rollout."""
    peers, given = batch.peers, batch.token_rewards or [None] * len(batch.masks)
    if peers is None:
        raise ValueError("--advantage-estimator grpo_token needs the groups of the rollout (peers)")
    if any(usable and of_one is None for usable, of_one in zip(peers.usable, given)):
        raise ValueError(
            "--advantage-estimator grpo_token compares rewards of tokens, and the reward function gave one for the response; "
            "return a number for each token, or use --advantage-estimator grpo"
        )
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, given)
    rows = [reward[mask] for reward, mask in zip(rewards, batch.masks)]

    def of_places(values: list[Tensor]) -> Tensor:
        """[groups, longest]: sums over the usable responses of all ranks."""
        sums = torch.zeros(peers.count, peers.longest, dtype=torch.float64)
        for value, group, usable in zip(values, peers.groups, peers.usable):
            if usable:
                sums[group, : value.numel()] += value
        return peers.total(sums)

    counts = of_places([torch.ones_like(row) for row in rows])
    mean = of_places(rows) / counts.clamp(min=1)
    centred = []
    for row, group in zip(rows, peers.groups):
        baseline = mean[group, : row.numel()]
        gap = row - baseline
        centred.append(torch.where(gap.abs() <= ROUNDING * baseline.abs(), 0.0, gap))
    if batch.normalize_std:
        std = (of_places([gap**2 for gap in centred]) / (counts - 1).clamp(min=1)).sqrt()
        centred = [
            gap / (std[group, : gap.numel()] + EPS) for gap, group in zip(centred, peers.groups)
        ]
    steps = []
    for gap, mask in zip(centred, batch.masks):
        step = torch.zeros(mask.numel(), dtype=torch.float64)
        step[mask] = gap
        steps.append(step)
    return discounted_returns(steps, batch.masks, batch.gamma)
