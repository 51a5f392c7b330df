"""Log-probability of the label and entropy from vocabulary-parallel logits.

Each tensor-parallel rank holds the logits of its slice of the padded vocabulary. Both results come
from one softmax, with two all-reduces forward (the maximum [T], and three sums [3, T]) and none
backward. Both gradients are exact,

    d log p(label) / d z_v = 1[v = label] - p_v          d H / d z_v = -p_v (log p_v + H).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.autograd import AutogradContext


class _Context(AutogradContext, Protocol):
    temperature: float
    logits_dtype: torch.dtype


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        logits: Tensor,
        labels: Tensor,
        vocab_start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        z = logits.float() / temperature  # (T, V/tp)
        local_columns = z.size(1)
        padding = vocab_start + local_columns - vocab_size
        if padding > 0:  # mask the padding of the vocabulary
            z[:, max(0, local_columns - padding) :] = float("-inf")
        reduce = group is not None and group.size() > 1

        top = z.amax(dim=1) if local_columns else z.new_full((z.size(0),), float("-inf"))
        if reduce:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z = z.sub_(top.unsqueeze(1))
        local_label = labels - vocab_start
        is_local = (local_label >= 0) & (local_label < local_columns)
        local_label = local_label.clamp(0, local_columns - 1)
        label_logit = torch.where(is_local, z.gather(1, local_label.unsqueeze(1)).squeeze(1), 0.0)

        p = z.exp()
        # p * z where p = 0 is 0 (banned tokens and padding have z = -inf)
        weighted = torch.where(p > 0, p * z, 0.0)
        sums = torch.stack([p.sum(dim=1), weighted.sum(dim=1), label_logit])  # (3, T)
        if reduce:
            dist.all_reduce(sums, group=group)
        denominator, weighted_sum, label_logit = sums
        log_denominator = denominator.log()
        log_probs = label_logit - log_denominator
        entropy = log_denominator - weighted_sum / denominator
        p = p.div_(denominator.unsqueeze(1))
        ctx.save_for_backward(p, local_label, is_local, entropy)
        ctx.temperature = temperature
        ctx.logits_dtype = logits.dtype
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: _Context, grad_log_probs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        p, local_label, is_local, entropy = ctx.saved_tensors
        grad = p * -grad_log_probs.unsqueeze(1)
        grad.scatter_add_(
            1, local_label.unsqueeze(1), torch.where(is_local, grad_log_probs, 0.0).unsqueeze(1)
        )
        if bool(grad_entropy.any()):
            log_p = torch.where(p > 0, p, 1.0).log_()
            grad -= p * (log_p + entropy.unsqueeze(1)) * grad_entropy.unsqueeze(1)
        return (grad / ctx.temperature).to(ctx.logits_dtype), None, None, None, None, None


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of labels and entropy of softmax(logits / temperature).

    Args:
        logits: [T, V_padded / tp], this rank's columns.
        labels: [T] int64 over the full vocabulary.
        vocab_size: Number of tokens without padding; padded columns get no probability and no
            gradient.

    Returns:
        (log-probs [T], entropy [T]), float32 and equal on all ranks of `tp_group`. Each rank gets
        the gradient of its own columns.
    """
    rank = 0 if tp_group is None else tp_group.rank()
    log_probs, entropy = _VocabParallelLogProbs.apply(
        logits, labels, rank * logits.size(1), vocab_size, tp_group, temperature
    )
    return log_probs, entropy
