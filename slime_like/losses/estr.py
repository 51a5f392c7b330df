"""Entropy-scaled trust region (ESTR), arXiv 2607.22186: an orthogonal mask for any loss.

    keep = 1[d^2 / (H + epsilon) <= tau],      d = log_prob - rollout_log_prob

A token with keep = 0 loses its policy term. Where the distribution is narrow a large d is noise of
the sampler, where it is wide it is exploration, and d^2 has the scale of the entropy H.

In the paper H is of the policy that sampled. Engines do not return it, so it is that of the current
policy, detached; the two agree where the weights do.
"""

from __future__ import annotations

from slime_like.lazy import Tensor
from slime_like.losses.inputs import LossInputs
from slime_like.metrics.typed import Metric, masked_mean


def estr_keep(inputs: LossInputs, threshold: float, floor: float) -> tuple[Tensor, Metric]:
    """(keep [T] bool, estr_mask_ratio: share of active tokens that are dropped).

    Args:
        threshold: tau.
        floor: epsilon, in nats.

    Raises:
        ValueError: The batch has no log-probs of the sampler, or no entropies.
    """
    difference = inputs.masked(inputs.log_probs.detach()) - inputs.required("rollout_log_probs")
    # also False where the difference is NaN
    keep = difference.square() <= threshold * (inputs.required("entropy") + floor)
    return keep | ~inputs.loss_mask, masked_mean(~keep, inputs.loss_mask)
