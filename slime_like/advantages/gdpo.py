"""GDPO: group reward-decoupled normalisation, arXiv 2601.05242, section 3: each part of a
reward is compared within its group on its own, so that a part of small numbers counts as much as one
of large ones, and different mixtures of parts stay different.

A_ik = (R_ik - mean of the group) / (std of the group + 1e-6)        of part k
A_i = (S_i - mean of the rollout) / (std of the rollout + 1e-6),    S_i = sum_k w_k A_ik

Standard deviations have Bessel's correction. The second normalisation is over the samples of the
rollout, as in the paper and TRL; verl's is over tokens.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS, grpo
from slime_like.advantages.registry import register_outcome_estimator
from slime_like.lazy import Tensor


def over_rollout(sums: Tensor, usable: Tensor) -> Tensor:
    """sums [B] normalised over the usable [B] bool."""
    known = sums[usable]
    if known.numel() < 2:
        return sums
    return (sums - known.mean()) / (known.std() + EPS)


register_outcome_estimator("gdpo", scales_by_std=True, combine=over_rollout)(grpo)
