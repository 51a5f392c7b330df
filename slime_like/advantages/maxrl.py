"""MaxRL, arXiv 2602.02710: GRPO with the group's mean as the unit, so that hard prompts count more.

A_i = (R_i - mean) / mean,    0 in a group with mean <= 0
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor, torch


@register_outcome_estimator("maxrl", divides_by_mean=True)
def maxrl(group: GroupRewards) -> Tensor:
    """(R_i - mean) / mean [n]."""
    mean = group.rewards.mean()
    return (group.rewards - mean) / mean if mean > 0 else torch.zeros_like(group.rewards)
