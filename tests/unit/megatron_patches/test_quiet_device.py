"""Patches that leave the device alone: the gradient norm, and shapes between pipeline stages."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

import megatron_patches
from megatron_patches.known_shapes import KnownShapes
from megatron_patches.moe_permute import sort_by_expert
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


def test_messages_have_the_shapes_of_the_micro_batches_in_order() -> None:
    known = KnownShapes([(5, 1, 8), (3, 1, 8)])
    assert known.take("from previous") == [5, 1, 8]
    known.check("to previous", torch.zeros(5, 1, 8))  # its gradient, on another count
    assert known.take("from previous") == [3, 1, 8]
    with pytest.raises(AssertionError):
        known.check("to previous", torch.zeros(5, 1, 8))


@pytest.mark.parametrize("with_probs", [True, False])
def test_tokens_sorted_by_expert_are_those_of_a_mask(with_probs: bool) -> None:
    """As megatron-core selects them: experts in order, and each expert's tokens in order."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(7, 3, generator=generator)
    probs = torch.rand(7, 4, generator=generator)
    chosen = probs.topk(2, dim=1).indices
    routing = torch.zeros(7, 4, dtype=torch.bool).scatter(1, chosen, True)
    found, weights, rows = sort_by_expert(tokens, routing, probs if with_probs else None, 14)
    expected = [(e, t) for e in range(4) for t in range(7) if routing[t, e]]
    assert rows.tolist() == [t for _, t in expected]
    assert torch.equal(found, tokens[rows])
    if with_probs:
        assert weights.tolist() == [float(probs[t, e]) for e, t in expected]
    else:
        assert weights is None
