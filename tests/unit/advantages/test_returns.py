"""Generalised advantage estimation against a loop over tokens, in float64."""

from __future__ import annotations

import random

import pytest
import torch

from slime_like.advantages import (
    gae,
)
from tests.unit.advantages.token_cases import LENGTHS, NAN, flat, gae_by_loop, samples


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 0.9)])
def test_gae(seed: int, gamma: float, lambd: float) -> None:
    masks, rewards = samples(seed)
    draw = random.Random(seed)
    values = [
        torch.tensor([draw.gauss(0, 2) for _ in range(n)], dtype=torch.float64) for n in LENGTHS
    ]
    for value, mask in zip(values, masks):
        value[~mask] = NAN  # never seen
    advantages, returns = gae(rewards, values, masks, gamma, lambd)
    expected = [
        gae_by_loop(r.tolist(), v.tolist(), m.tolist(), gamma, lambd)
        for r, v, m in zip(rewards, values, masks)
    ]
    assert flat(advantages) == pytest.approx(flat([e[0] for e in expected]), rel=1e-12, abs=1e-12)
    assert flat(returns) == pytest.approx(flat([e[1] for e in expected]), rel=1e-12, abs=1e-12)
