"""Tensors that later layers read get the gradients of plain autograd, also where layers are computed
again in backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime_like.megatron.ops.side_tensors import SideTensor, borrow, lend

Sides = dict[str, SideTensor]


def first(hidden: Tensor, weight: Tensor, sides: Sides) -> Tensor:
    """Lends what it makes of its input, and uses it too."""
    keys = hidden @ weight
    return hidden + lend(keys, keys, sides, "keys").sin()


def later(hidden: Tensor, weight: Tensor, sides: Sides) -> Tensor:
    """Reads all of it, and a part."""
    keys = borrow(hidden, sides["keys"])
    return hidden + (hidden @ weight) * keys + borrow(hidden, sides["keys"], 1, 2)


def plain(hidden: Tensor, weights: list[Tensor]) -> Tensor:
    keys = hidden @ weights[0]
    hidden = hidden + keys.sin()
    for weight in weights[1:]:
        hidden = hidden + (hidden @ weight) * keys + keys[..., 1:2]
    return hidden


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients(recomputed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 4), *[(4, 4)] * 3]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    expected = torch.autograd.grad(plain(inputs[0], inputs[1:]).square().sum(), inputs)
    sides: Sides = {}
    hidden = inputs[0]
    for layer, weight in zip((first, later, later), inputs[1:], strict=True):
        if recomputed:
            hidden = checkpoint(layer, hidden, weight, sides, use_reentrant=True)
        else:
            hidden = layer(hidden, weight, sides)
    hidden.square().sum().backward()
    for tensor, gradient in zip(inputs, expected, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-13, atol=1e-13)
    assert sides["keys"].gradient is None, "taken"


def test_one_that_nobody_reads() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    lend(x, x, {}, "keys").sum().backward()
    assert x.grad is not None and x.grad.eq(1).all()
