"""An advantage estimator: the rank of each reward in its group, from -1 (worst) to 1 (best). The
scale of the reward does not matter."""

import torch

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator


@register_outcome_estimator("rank", help="the rank of the reward in its group.")
def rank(group: GroupRewards) -> torch.Tensor:
    """Advantages [n] of one group; equal rewards get equal ranks."""
    differences = group.rewards[:, None] - group.rewards[None, :]
    return differences.sign().sum(dim=1) / (len(group.rewards) - 1)
