"""Limits from inputs that are off by an epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_like.certify.compare import Reference


class Routed:
    """One layer, whose router chooses by the sign of an input that is 0 up to rounding."""

    layers = (None,)
    dtype = torch.bfloat16

    def run(self, sequences: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = inputs["embedding"].double()
        first = hidden[:, 0] >= 1
        chosen = torch.stack([first, ~first], dim=1).double()
        return {"layers.0.router": chosen, "layers.0.mlp": chosen, "layers.0": hidden + chosen}

    def weights(self) -> dict[str, Tensor]:
        return {}


def test_other_experts_are_no_rounding_however_many() -> None:
    """Half of the tokens choose others for inputs that are off by an epsilon. The differences of
    these, of about 1, would be the limit of the layer, which then finds no fault."""
    model: Any = Routed()
    inputs = {"embedding": torch.ones(40, 2, dtype=torch.bfloat16)}
    reference = Reference(model, model, [torch.arange(40)], inputs)
    before = dict(reference.limits)
    states = dict(reference.states)
    states["layers.0.mlp"] = torch.zeros(40, 2)
    gaps = reference.gaps(states)
    assert gaps["layers.0.mlp"].differs and not gaps["layers.0.router"].differs
    assert reference._condition_is_known
    assert max(reference.limits.values()) < 0.1
    assert reference.limits["layers.0.router"] == before["layers.0.router"]
