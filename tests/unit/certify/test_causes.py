"""Causes of a difference in one layer, in cases that no model of the planted faults has."""

from __future__ import annotations

import torch

from slime_like.certify.causes import LayerCauses
from slime_like.certify.compare import relative_gap
from slime_like.certify.layered import Call


def test_a_layer_that_lower_precisions_do_not_round() -> None:
    """The rounding of small integers is 0."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-8, 8, (1, 20, 16), generator=generator).double()
    observed = {"layers.0": hidden[0] + torch.randn(20, 16, generator=generator)}
    search = LayerCauses(
        torch.nn.Identity(),
        [Call(hidden, (), {})],
        "layers.0",
        observed,
        {"layers.0": 1e-6},
        "",
        relative_gap,
    )
    assert search.find() is None
