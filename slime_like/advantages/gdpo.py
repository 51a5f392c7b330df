"""GDPO: group reward-decoupled normalisation, arXiv 2601.05242, section 3: each reward component k
is normalised within its group separately, so that its scale does not matter.

    A_ik = (R_ik - mean of the group) / (std of the group + 1e-6)
    A_i = (S_i - mean of the rollout) / (std of the rollout + 1e-6),    S_i = sum_k w_k A_ik

Standard deviations have Bessel's correction. The second normalisation is over the samples of the
rollout, as in the paper and TRL; verl's is over tokens.
"""

from __future__ import annotations

from slime_like.advantages.grpo import EPS, grpo
from slime_like.advantages.registry import register_outcome_estimator
from slime_like.lazy import Tensor


def normalize_rollout(sums: Tensor, valid: Tensor) -> Tensor:
    """Normalise sums [B] by the statistics of the valid samples [B] bool."""
    valid_sums = sums[valid]
    if valid_sums.numel() < 2:
        return sums
    return (sums - valid_sums.mean()) / (valid_sums.std() + EPS)


register_outcome_estimator("gdpo", scales_by_std=True, combine=normalize_rollout)(grpo)
