"""The norm and the rotation that megatron_patches puts in place of chains of torch's operations:
their bits, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_patches.packed_ops import FusedRMSNorm, PackedRMSNorm, Rotation

EPS = 1e-6


def of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], weight, EPS)


def lean(x: Tensor, weight: Tensor) -> Tensor:
    norm = PackedRMSNorm(x.size(-1), eps=EPS)
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def of_megatron(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : cos.size(-1)], x[..., cos.size(-1) :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def with_gradients(
    compute: Callable[..., Tensor], x: Tensor, other: Tensor, *more: Tensor
) -> list[Tensor]:
    """Of a residual block, whose input has other uses too."""
    x, other = x.clone().requires_grad_(), other.clone().requires_grad_(not more)
    y = x + torch.tanh(compute(x, other, *more))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype))
    return [t for t in (y, x.grad, other.grad) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 1, 128), (77, 1, 4, 32)])
def test_the_norm_has_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    found, expected = (with_gradients(norm, x, weight) for norm in (lean, of_torch))
    assert len(found) == 3 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotated", [32, 16])
def test_the_rotation_has_the_bits_of_megatron_core(rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(77, 1, 4, 32, dtype=dtype), torch.randn(77, 1, 1, rotated)
    parts = angles.cos().to(dtype), angles.sin().to(dtype)
    found, expected = (
        with_gradients(rotate, x, *parts) for rotate in (Rotation.apply, of_megatron)
    )
    assert len(found) == 2 and all(map(torch.equal, found, expected))


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: FusedRMSNorm.apply(x, x, w, EPS), inputs)
    angles = torch.randn(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: Rotation.apply(x, angles.cos(), angles.sin()), (x,))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    lean(x, torch.nn.Parameter(weight, requires_grad=False)).sum().backward()
    expected = x.grad
    x.grad = None
    of_torch(x, weight).sum().backward()
    assert expected is not None and x.grad is not None and torch.equal(expected, x.grad)
