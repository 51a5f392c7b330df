"""Divergence between the next-token distributions of policy (p) and teacher (q), over K tokens and
one bucket for all other tokens:

    alpha = 1   KL(p || q)                                  the direction of on-policy distillation
    alpha = 0   KL(q || p)
    between     (1 - alpha) KL(p || m) + alpha KL(q || m),  m = (1 - alpha) p + alpha q

Source: SDPO, "Reinforcement Learning via Self-Distillation", arXiv 2601.20802, section 3, for the K
tokens that the student finds likeliest and the bucket; SDFT, "Self-Distillation Enables Continual
Learning", arXiv 2601.19897, for KL(p || q); Agarwal et al., arXiv 2306.13649, equation 1, for the
generalised Jensen-Shannon divergence, with the weight that TRL has. Of K = the whole vocabulary it
is exact: the bucket of both is empty.
"""

from __future__ import annotations

import math

from slime_like.lazy import Tensor, torch

# upper bound of the log of the K tokens' total probability, so that the bucket's log is finite
FULL = -1e-7


def set_divergence(log_probs: Tensor, teacher_probs: Tensor, alpha: float) -> Tensor:
    """Divergence per token, [T], differentiable with respect to log_probs; 0 where teacher_probs
    are all 0.

    Args:
        log_probs: [T, K] of the policy.
        teacher_probs: [T, K] of the same tokens, constants.
        alpha: 0 <= alpha <= 1.
    """
    teacher = teacher_probs.detach().to(log_probs.dtype)
    taught = teacher.sum(dim=1) > 0
    # masked before the logarithm, so that tokens without a teacher get no NaN gradient
    student = _with_rest(
        torch.where(taught.unsqueeze(1), log_probs, math.log(0.5 / teacher.size(1)))
    )
    other = _with_rest(teacher.clamp(min=torch.finfo(torch.float32).tiny).log())
    if alpha == 1:
        found = _kl(student, other)
    elif alpha == 0:
        found = _kl(other, student)
    else:
        parts = [student + math.log(1 - alpha), other + math.log(alpha)]
        mixture = torch.logsumexp(torch.stack(parts), dim=0)
        found = (1 - alpha) * _kl(student, mixture) + alpha * _kl(other, mixture)
    return torch.where(taught, found, 0.0)


def _with_rest(log_probs: Tensor) -> Tensor:
    """[T, K] -> [T, K + 1]: append the log-probability of the bucket, log(1 - sum of the K)."""
    total = torch.logsumexp(log_probs, dim=1, keepdim=True).clamp(max=FULL)
    return torch.cat([log_probs, torch.log(-torch.expm1(total))], dim=1)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(dim=1)
