"""GPG, arXiv 2504.02546: the centred reward, scaled up to compensate for groups of equal rewards.

    A_i = alpha (R_i - mean),    alpha = samples / samples in groups whose rewards differ

This is our reading of the paper's valid samples; verl counts nonzero rewards.
"""

from __future__ import annotations

from slime_like.advantages.batch_mean import centred
from slime_like.advantages.registry import GroupRewards, register_outcome_estimator
from slime_like.lazy import Tensor


def alpha(samples: int, differing: int) -> float:
    """Samples of the rollout / those in groups whose rewards differ."""
    return samples / max(differing, 1)


@register_outcome_estimator("gpg", batch_factor=alpha)
def gpg(group: GroupRewards) -> Tensor:
    """R_i - mean [n], which `alpha` multiplies for the whole rollout."""
    return centred(group)
