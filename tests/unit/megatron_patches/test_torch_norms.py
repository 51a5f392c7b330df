"""The gradient norm without a wait for the device, against megatron-core's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

import megatron_patches
from megatron_patches.torch_norms import l2_norm, scale

megatron_patches.apply()


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((300,), (7, 11), (1,), (0,))]


def test_the_norm_is_that_of_megatron_core_to_the_last_bit() -> None:
    expected, _ = local_multi_tensor_l2_norm(0, None, [gradients()], False)
    found, _ = l2_norm(0, None, [gradients()], False)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    coarse = [gradient.bfloat16() for gradient in gradients()]
    found, _ = l2_norm(0, None, [coarse], False)
    exact = torch.cat([gradient.double().flatten() for gradient in coarse]).norm()
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)


def test_scaling_in_place_is_that_of_megatron_core() -> None:
    expected, found = gradients(), gradients()
    local_multi_tensor_scale(0, None, [expected, expected], 0.3)
    scale(0, None, [found, found], 0.3)
    assert all(map(torch.equal, found, expected))
    copies = [torch.empty_like(gradient) for gradient in gradients()]
    scale(0, None, [gradients(), copies], 0.3)
    assert all(map(torch.equal, copies, expected))
