"""On-policy distillation: subtract the gap to a teacher from the advantage.

    A_t <- A_t - coef (o_t - q_t)        o, q: log-prob of the old policy and of the teacher

The gap's expectation under the policy is the reverse KL to the teacher, so its policy gradient
descends KL(policy || teacher) one token at a time. Sources: Agarwal et al., "On-Policy Distillation
of Language Models", arXiv 2306.13649, section 3; Thinking Machines Lab, "On-Policy Distillation"
(2025), for the form with a policy-gradient loss.

IW-OPD, arXiv 2606.22600, algorithm 1, weights a token's gap by the distance of the prefix to the
teacher:

    w_t = 1 + gamma (1 - sum_{s < t} |o_s - q_s| / sum_s |o_s - q_s|)

over active tokens, from 1 + gamma at the first down to about 1, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, torch
from slime_like.validation import require_samples


def teacher_gaps(
    old_log_probs: Sequence[Tensor], teacher_log_probs: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[Tensor]:
    """old - teacher, [R] float64 per sample, 0 at inactive tokens. All arguments: [R] per sample.
    Raises ValueError for another shape."""
    require_samples(masks, old_log_probs=old_log_probs, teacher_log_probs=teacher_log_probs)
    gaps = []
    for old, teacher, mask in zip(old_log_probs, teacher_log_probs, masks, strict=True):
        gap = torch.where(mask, old, 0.0).double() - torch.where(mask, teacher, 0.0).double()
        gaps.append(torch.where(mask, gap, 0.0))
    return gaps


def prefix_weights(gaps: Sequence[Tensor], masks: Sequence[Tensor], gamma: float) -> list[Tensor]:
    """w [R] float64 per sample for the `teacher_gaps`, 0 at inactive tokens. gamma: >= 0."""
    require_samples(masks, gaps=gaps)
    weights = []
    for gap, mask in zip(gaps, masks, strict=True):
        size = torch.where(mask, gap.double().abs(), 0.0)
        before = size.cumsum(0) - size
        total = size.sum()
        share = before / total if total > 0 else torch.zeros_like(before)
        weights.append(torch.where(mask, 1 + gamma * (1 - share), 0.0))
    return weights
