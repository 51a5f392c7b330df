"""Tensors that layers read beside the hidden state: keys and values of another layer, or a part of
what was made for all layers at once.

Full recomputation runs a layer again in backward, in a graph that ends at the layer's own input:
backward of a tensor from elsewhere would run once for every layer. Here a reader has the tensor
without its graph, and adds its gradient to a sum that the layer which lent it takes in backward.
Reader and lender are in the graph of the hidden state, by which backward of the lender comes after
that of every reader, with recomputation or without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class SideTensor:
    """A tensor [rows, 1, ...], and the sum of its readers' gradients so far."""

    value: Tensor
    gradient: Tensor | None = None

    def add(self, gradient: Tensor, start: int, stop: int) -> None:
        """Add a gradient of the columns [start, stop)."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.value)
        self.gradient[..., start:stop] += gradient


def lend(hidden: Tensor, value: Tensor, sides: dict[str, SideTensor], name: str) -> Tensor:
    """Lend `value` as `sides`[name] to later layers. Returns `hidden`, on which those have to
    depend. Recomputation lends again, and takes the gradients that came to the first time."""
    if name in sides:
        sides[name].value = value.detach()
    else:
        sides[name] = SideTensor(value.detach())
    lent: Tensor = _Lend.apply(hidden, value, sides[name])
    return lent


def borrow(hidden: Tensor, side: SideTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """The columns [start, stop) of the last dimension of a tensor that was lent. hidden: the input
    of the reader."""
    stop = side.value.size(-1) if stop is None else stop
    borrowed: Tensor = _Borrow.apply(hidden, side, start, stop)
    return borrowed


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, side: SideTensor) -> Tensor:
        ctx.side = side
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        found = ctx.side.gradient
        ctx.side.gradient = None
        return gradient, found, None


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, side: SideTensor, start: int, stop: int) -> Tensor:
        ctx.side = side
        ctx.columns = (start, stop)
        return side.value[..., start:stop]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.side.add(gradient, *ctx.columns)
        return None, None, None, None
