"""Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1: an orthogonal mask for
any loss with an old policy.

    keep = 0 where A < 0 and D > delta, else 1,      D = mean of (old_log_prob - log_prob)

over the active tokens of the sequence. A token with keep = 0 loses its policy term.
"""

from __future__ import annotations

from slime_like.lazy import Tensor
from slime_like.losses.inputs import LossInputs, sequence_mean_metric
from slime_like.metrics.typed import Metric


def opsm_keep(inputs: LossInputs, delta: float) -> tuple[Tensor, Metric]:
    """(keep [T] bool, opsm_clipfrac: share of the sequences with active tokens that lose any)."""
    log_ratio = inputs.masked(inputs.log_probs.detach()) - inputs.required("old_log_probs")
    divergence = inputs.seq_mean(-log_ratio)
    keep = ~(inputs.required("advantages") < 0) | (divergence <= delta)
    has_masked = inputs.seq_sum((~keep).float()) > 0
    return keep, sequence_mean_metric(inputs, has_masked.float())
