"""pass@k with k the group size, Tang et al., arXiv 2503.19595, or max@k for real-valued rewards: by
how much the group's best reward would drop without the response.

    A_i = (max_j R_j - max_{j != i} R_j) / (std + 1e-6):  R_best - R_second for the best, else 0

The paper's gradient for k samples with the leave-one-out baseline has no division; verl's
grpo_passk divides as GRPO does, and --disable-grpo-std-normalization disables it. A group with two
best responses has no gradient.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor, torch


@register_outcome_estimator("pass_at_k", scales_by_std=True, aliases=("grpo_passk",))
def pass_at_k(group: GroupRewards) -> Tensor:
    """R_best - R_second for the best response, 0 for the others [n]; over std + 1e-6 with
    `normalize_std`."""
    best, index = group.rewards.topk(2)
    gap = best[0] - best[1]
    if group.normalize_std:
        gap = gap / (group.rewards.std() + EPS)
    return torch.zeros_like(group.rewards).index_fill(0, index[:1], float(gap))
