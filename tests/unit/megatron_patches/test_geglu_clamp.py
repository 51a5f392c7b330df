"""gpt-oss's activation, fused: against its definition in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

import megatron_patches


def defined(x: Tensor, bias: Tensor | None, weights: Tensor, limit: float | None) -> Tensor:
    """gate sigmoid(1.702 gate) (up + 1), of the clamped sum of product and bias (transformers'
    GptOssExperts)."""
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1) * weights


@pytest.mark.parametrize("module", ["transformer.mlp", "transformer.moe.experts"])
@pytest.mark.parametrize("limit", [None, 0.7, 7.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_limit_holds_for_the_sum(module: str, limit: float | None, has_bias: bool) -> None:
    megatron_patches.apply()
    fused = importlib.import_module(f"megatron.core.{module}").weighted_bias_quick_geglu_impl
    g = torch.Generator().manual_seed(5)
    x, bias, weights = (
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 8), (8,), (6, 1))
    )
    inputs = (x, bias, weights) if has_bias else (x, weights)
    found, expected = (
        function(x, bias if has_bias else None, weights, *more)
        for function, more in ((fused, (False, 1.0, limit)), (defined, (limit,)))
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    of_found, of_expected = (
        torch.autograd.grad(output.square().sum(), inputs) for output in (found, expected)
    )
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-14)
