"""Cross-entropy between two distributions over the vocabulary, both given by hidden states and the
same projection, without materialising logits:

    H(q, p) = -sum_v q_v log p_v = log sum_v e^(z_v) - sum_v q_v z_v        dH / dz_v = p_v - q_v

with z the logits of p. Computed in blocks as in fused_linear_logprob.py, with one more running sum.
Neither q nor the projection gets a gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.autograd import AutogradContext
from slime_like.megatron.ops.fused_linear_logprob import (
    DEFAULT_CHUNK_SIZE,
    LOWEST,
    Projection,
    columns_of_rank,
    rows_to_score,
)


class _Context(AutogradContext, Protocol):
    settings: tuple[float, int, int]  # temperature, columns, chunk size


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_size: int,
    ) -> Tensor:
        num_columns = columns_of_rank(weight, vocab_size, group)[1]
        p, q = (
            Projection(states, weight, None, temperature, num_columns, chunk_size)
            for states in (hidden, targets)
        )
        norm_p, norm_q, mean = _statistics(p, q, group)
        ctx.save_for_backward(hidden, targets, weight, norm_p, norm_q)
        ctx.settings = temperature, num_columns, chunk_size
        return norm_p - mean

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, weight, norm_p, norm_q = ctx.saved_tensors
        p, q = (Projection(states, weight, None, *ctx.settings) for states in (hidden, targets))
        scale = (grad / p.temperature).unsqueeze(1)
        of_hidden = torch.zeros_like(hidden, dtype=p.dtype)
        rooms = p.workspace(), q.workspace()
        for columns in p.column_blocks():
            for rows in p.row_blocks():
                z, _ = p.blocks(rooms[0], rows, columns)
                y, _ = q.blocks(rooms[1], rows, columns)
                z = p.shifted(z, norm_p[rows]).exp_()
                z.sub_(q.shifted(y, norm_q[rows]).exp_()).mul_(scale[rows])
                of_hidden[rows] += z.to(weight.dtype) @ weight[columns]
        return (of_hidden.to(hidden.dtype), *[None] * 6)


def _statistics(
    p: Projection, q: Projection, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log normaliser of p, log normaliser of q, mean of p's logits under q), [N] each."""
    size = p.hidden.size(0)
    top_p, top_q = p.hidden.new_full((2, size), LOWEST, dtype=p.dtype)
    total_p, total_q, mean = top_p.new_zeros((3, size))
    rooms = p.workspace(), q.workspace()
    for columns in p.column_blocks():
        for rows in p.row_blocks():
            z, room = p.blocks(rooms[0], rows, columns)
            y, _ = q.blocks(rooms[1], rows, columns)
            new_p = torch.maximum(top_p[rows], z.amax(dim=1))
            new_q = torch.maximum(top_q[rows], y.amax(dim=1))
            change = (top_q[rows] - new_q).exp()
            y = q.shifted(y, new_q).exp_()
            total_q[rows] = total_q[rows] * change + y.sum(dim=1)
            mean[rows] = mean[rows] * change + torch.mul(y, z, out=y).sum(dim=1)
            torch.exp(z.sub_(new_p.unsqueeze(1)), out=room)
            total_p[rows] = total_p[rows] * (top_p[rows] - new_p).exp() + room.sum(dim=1)
            top_p[rows], top_q[rows] = new_p, new_q
    if group is not None and group.size() > 1:
        tops = torch.stack([top_p, top_q])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
        change = (top_q - tops[1]).exp()
        sums = torch.stack([total_p * (top_p - tops[0]).exp(), total_q * change, mean * change])
        dist.all_reduce(sums, group=group)
        (top_p, top_q), (total_p, total_q, mean) = tops, sums
    return top_p + total_p.log(), top_q + total_q.log(), mean / total_q


def soft_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    *,
    vocab_size: int,
    rows: Tensor,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> Tensor:
    """Cross-entropy H(q, p) per row, differentiable only in `hidden`.

    Args:
        hidden: Hidden states that give p; see `fused_linear_log_probs`, also for other arguments.
        targets: [N, H], hidden states that give q, equal on all ranks of `tp_group`.
        rows: [N] int64, rows of `hidden` to compute.

    Returns:
        [N], float32 for narrower inputs.
    """
    hidden = rows_to_score(hidden, rows, tp_group, sequence_parallel=sequence_parallel)
    settings = (vocab_size, temperature, tp_group, chunk_size)
    losses: Tensor = _SoftCrossEntropy.apply(hidden, targets.detach(), weight.detach(), *settings)
    return losses
