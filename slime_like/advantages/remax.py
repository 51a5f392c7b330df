"""ReMax, arXiv 2310.10505: the return minus the reward of the greedy response to the same prompt.

A_t = sum_{s >= t} gamma^(s-t) R_s - R_greedy,    R_s = -penalty_s + R at the last active token
"""

from __future__ import annotations

from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.tree_returns import batch_returns
from slime_like.lazy import Tensor, torch


@register_token_estimator("remax", needs_greedy=True, follows_tokens=True)
def remax(batch: TokenRewards) -> list[Tensor]:
    """A_t = G_t - R_greedy with the discounted return G_t, [R] per sample."""
    if batch.greedy_rewards is None:
        raise ValueError(
            "--advantage-estimator remax needs the reward of a greedy response (greedy_rewards)"
        )
    returns = batch_returns(batch)
    return [
        torch.where(mask, value - greedy, 0.0)
        for value, mask, greedy in zip(returns, batch.masks, batch.greedy_rewards)
    ]
