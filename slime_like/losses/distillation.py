"""Divergence between the next-token distributions of policy (p) and teacher (q), over K tokens and
one bucket for all other tokens:

    alpha = 1   KL(p || q)                                  the direction of on-policy distillation
    alpha = 0   KL(q || p)
    between     (1 - alpha) KL(p || m) + alpha KL(q || m),  m = (1 - alpha) p + alpha q

Sources: SDPO, "Reinforcement Learning via Self-Distillation", arXiv 2601.20802, section 3, for the
student's top K tokens and the bucket; SDFT, "Self-Distillation Enables Continual Learning", arXiv
2601.19897, for KL(p || q); Agarwal et al., arXiv 2306.13649, equation 1, for the generalised
Jensen-Shannon divergence, with TRL's weight. It is exact if K is the full vocabulary: the bucket of
both is empty.
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
    has_teacher = teacher.sum(dim=1) > 0
    # masked before the logarithm, so that tokens without a teacher get no NaN gradient
    uniform = math.log(0.5 / teacher.size(1))
    p = _append_rest(torch.where(has_teacher.unsqueeze(1), log_probs, uniform))
    q = _append_rest(teacher.clamp(min=torch.finfo(torch.float32).tiny).log())
    if alpha == 1:
        divergence = _kl(p, q)
    elif alpha == 0:
        divergence = _kl(q, p)
    else:
        parts = torch.stack([p + math.log(1 - alpha), q + math.log(alpha)])
        mixture = torch.logsumexp(parts, dim=0)
        divergence = (1 - alpha) * _kl(p, mixture) + alpha * _kl(q, mixture)
    return torch.where(has_teacher, divergence, 0.0)


def _append_rest(log_probs: Tensor) -> Tensor:
    """[T, K] -> [T, K + 1]: append the log-probability of the bucket, log(1 - sum of the K)."""
    total = torch.logsumexp(log_probs, dim=1, keepdim=True).clamp(max=FULL)
    return torch.cat([log_probs, torch.log(-torch.expm1(total))], dim=1)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(dim=1)
