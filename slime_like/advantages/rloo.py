"""RLOO: the reward against the mean of the others in its group, Ahmadian et al. 2024, arXiv
2402.14740, equation 10.

A_i = (R_i - mean) n / (n - 1)
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, OutcomeEstimator, advantage_estimators
from slime_like.lazy import Tensor


def rloo(group: GroupRewards) -> Tensor:
    n = group.rewards.numel()
    return (group.rewards - group.rewards.mean()) * n / (n - 1)


advantage_estimators.add("rloo", OutcomeEstimator("rloo", rloo))
