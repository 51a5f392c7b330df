"""The reward against the mean of all samples of the rollout: a baseline without groups, for one
answer a prompt.

A_i = R_i - mean_j R_j, over all samples j with a finite reward, and nothing is divided: REINFORCE
with a constant baseline, Williams 1992, section 4. Prompts that are easier than the mean are pulled
up and harder ones down, which the groups of grpo avoid.
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor


@register_outcome_estimator("batch_mean", over_batch=True)
def centred(group: GroupRewards) -> Tensor:
    """R_i minus the mean [n]."""
    return group.rewards - group.rewards.mean()
