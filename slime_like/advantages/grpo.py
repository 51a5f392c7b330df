"""GRPO: the reward relative to its group, DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO
(arXiv 2503.20783) without the division.

A_i = (R_i - mean) / (std + 1e-6)        std with Bessel's correction
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor

EPS = 1e-6


@register_outcome_estimator("grpo", scales_by_std=True)
def grpo(group: GroupRewards) -> Tensor:
    """(R_i - mean) / (std + 1e-6) [n], or R_i - mean without `normalize_std`."""
    centred = group.rewards - group.rewards.mean()
    return centred / (group.rewards.std() + EPS) if group.normalize_std else centred
