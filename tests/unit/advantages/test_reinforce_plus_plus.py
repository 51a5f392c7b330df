"""REINFORCE++ against loops over tokens, in float64."""

from __future__ import annotations

import pytest
import torch

from slime_like.advantages import (
    AdvantageSettings,
)
from tests.unit.advantages.token_cases import (
    GROUPS,
    REWARDS,
    estimate,
    flat,
    penalised,
    returns_by_loop,
    samples,
)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus(gamma: float, seed: int) -> None:
    masks, kl = samples(seed)
    settings = AdvantageSettings("reinforce_plus_plus", gamma=gamma, kl_coef=0.3)
    got = estimate(settings, masks, kl)
    expected = [
        returns_by_loop(penalised(r, m, k, 0.3), m.tolist(), gamma)
        for r, m, k in zip(REWARDS, masks, kl)
    ]
    assert flat(got.values) == pytest.approx(flat(expected), rel=1e-6, abs=1e-7)
    assert all(v.dtype == torch.float32 for v in got.values)
    total, active = sum(float(k.sum()) for k in kl), sum(int(m.sum()) for m in masks)
    assert got.metrics["rollout/kl_in_reward"] == pytest.approx(total / active)


def test_reinforce_plus_plus_baseline() -> None:
    masks, kl = samples(4)
    got = estimate(AdvantageSettings("reinforce_plus_plus_baseline", kl_coef=0.3), masks, kl)
    for i, (mask, k) in enumerate(zip(masks, kl)):
        peers = [r for r, g in zip(REWARDS, GROUPS) if g == GROUPS[i]]
        mean = sum(peers) / len(peers)
        expected = [
            REWARDS[i] - mean - 0.3 * float(k[t]) if mask[t] else 0.0 for t in range(mask.numel())
        ]
        assert got.values[i].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)
