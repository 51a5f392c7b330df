"""Sums over the context-parallel ranks that share the tokens of a micro-batch.

The loss is the sum of the ranks' partial losses. If a sum over ranks enters it, every rank's
partial loss depends on every rank's tokens; the backward pass therefore all-reduces the gradient of
that sum, which is exact. All ranks of the group must take part in every sum and its backward pass,
even without tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

from slime_like.autograd import AutogradContext
from slime_like.lazy import Tensor, dist, torch


class _RanksContext(AutogradContext, Protocol):
    group: dist.ProcessGroup


@cache
def _autograd_sum() -> type[torch.autograd.Function]:
    class SumOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: _RanksContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx: _RanksContext, grad: Tensor) -> tuple[Tensor, None]:
            total = grad.clone()
            dist.all_reduce(total, group=ctx.group)
            return total, None

    return SumOverRanks


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Differentiable sum of x over the ranks of `group` (None: this process). One collective in
    forward, and one in backward."""
    if group is None or group.size() == 1:
        return x
    total: Tensor = _autograd_sum().apply(x, group)
    return total


def gather_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate x [n] of all ranks: [size * n], detached. n is equal on all ranks."""
    if group is None or group.size() == 1:
        return x.detach()
    gathered = x.new_empty(group.size() * x.numel())
    dist.all_gather_into_tensor(gathered, x.detach().contiguous(), group=group)
    return gathered
