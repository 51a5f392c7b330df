"""RLOO: the reward against the mean of the others in its group, Ahmadian et al. 2024, arXiv
2402.14740, equation 10.

A_i = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean) n / (n - 1)
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor


@register_outcome_estimator("rloo")
def rloo(group: GroupRewards) -> Tensor:
    """R_i minus the mean of the others [n]."""
    n = group.rewards.numel()
    return (group.rewards - group.rewards.mean()) * n / (n - 1)
