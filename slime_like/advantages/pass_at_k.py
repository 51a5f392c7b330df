"""pass@k, for a k of the group's size, Tang et al., arXiv 2503.19595, and max@k of rewards that are
any number: what the group's best reward would lose without the response.

A_i = max_j R_j - max_{j != i} R_j, divided by (std + 1e-6):     R_best - R_second for the best, 0 for the others

The paper's gradient for k samples with the leave-one-out baseline has no division; verl's grpo_passk
divides as GRPO does, and --disable-grpo-std-normalization leaves it out.
Where two are best, none is missed, and the group has no gradient.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor, torch


@register_outcome_estimator("pass_at_k", scales_by_std=True, aliases=("grpo_passk",))
def pass_at_k(group: GroupRewards) -> Tensor:
    best, place = group.rewards.topk(2)
    missed = best[0] - best[1]
    if group.normalize_std:
        missed = missed / (group.rewards.std() + EPS)
    return torch.zeros_like(group.rewards).index_fill(0, place[:1], float(missed))
