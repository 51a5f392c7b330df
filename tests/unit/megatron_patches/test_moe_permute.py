"""Tokens sorted by expert, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.moe_permute import sort_by_expert


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
