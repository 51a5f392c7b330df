"""REINFORCE++, arXiv 2501.03262: no group; the KL is a reward of each token, and whitening over the
whole rollout is the baseline.

    reinforce_plus_plus            A_t = sum_{s >= t} gamma^(s-t) R_s
                                   R_s = -penalty_s + R at the last active token
    reinforce_plus_plus_baseline   A_t = R - mean of the group - penalty_t

With token rewards r, R_s = -penalty_s + r_s in the first of the two. Distances s - t count active
tokens; trees of agents are in `tree_returns.py`. Both are whitened afterwards (`whitening.py`).
"""

from __future__ import annotations

from slime_like.advantages.batch_mean import centred
from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.tree_returns import batch_returns
from slime_like.lazy import Tensor, torch


# reinforce++: SkyRL's name
@register_token_estimator(
    "reinforce_plus_plus",
    whitens=True,
    takes_token_rewards=True,
    follows_tokens=True,
    aliases=("reinforce++",),
)
def reinforce_plus_plus(batch: TokenRewards) -> list[Tensor]:
    """A_t = R_t + gamma A_next over active tokens, [R] per sample."""
    return batch_returns(batch)


@register_token_estimator(
    "reinforce_plus_plus_baseline", outcome=centred, whitens=True, discounts=False
)
def reinforce_plus_plus_baseline(batch: TokenRewards) -> list[Tensor]:
    """A_t = (R - mean) - penalty_t, [R] per sample; `batch.outcomes` are `centred`."""
    return [
        torch.where(mask, outcome - penalty.double(), 0.0)
        for outcome, mask, penalty in zip(batch.outcomes, batch.masks, batch.penalties)
    ]
