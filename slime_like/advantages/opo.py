"""OPO, arXiv 2505.23585: the minimum-variance baseline if gradients grow with response length.

A_i = R_i - sum_j L_j R_j / sum_j L_j        L: active tokens
"""

from __future__ import annotations

from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor


@register_outcome_estimator("opo")
def opo(group: GroupRewards) -> Tensor:
    """R_i - sum_j L_j R_j / sum_j L_j [n]."""
    baseline = (group.lengths * group.rewards).sum() / group.lengths.sum().clamp(min=1)
    return group.rewards - baseline
