"""The KL in the reward, and the controllers of its coefficient."""

from __future__ import annotations

import pytest
import torch

from slime_like.advantages import (
    KLController,
    token_kl,
)
from slime_like.losses.kl import kl_estimate
from tests.unit.advantages.token_cases import NAN, samples


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl", "abs"])
def test_token_kl_sees_active_tokens_only(kind: str) -> None:
    masks, old = samples(0)
    ref = [torch.randn(m.numel(), dtype=torch.float64) for m in masks]
    dirty = [torch.where(m, x, NAN) for m, x in zip(masks, ref)]
    for mask, got, o, f in zip(masks, token_kl(kind, old, dirty, masks), old, ref):
        assert torch.equal(got, torch.where(mask, kl_estimate(kind, o, f), 0.0))


def test_controllers() -> None:
    fixed = KLController(0.2)
    fixed.update(5.0, 1000)
    fixed.load_state_dict({"value": 9.0})
    assert fixed.value == 0.2, "the command line says what a fixed coefficient is"
    adaptive = KLController(0.2, target=0.1, horizon=10000)
    adaptive.update(0.11, 500)
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.1 * 500 / 10000))
    adaptive.update(5.0, 500)  # clipped at 0.2 above
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.1 * 0.05) * (1 + 0.2 * 0.05))
    before = adaptive.value
    adaptive.update(-5.0, 500)  # k1 may be negative: clipped at 0.2 below
    assert adaptive.value == pytest.approx(before * (1 - 0.2 * 0.05))
    other = KLController(0.2, target=0.1, horizon=10000)
    other.load_state_dict(adaptive.state_dict())
    assert other.value == adaptive.value
    adaptive.update(NAN, 500)
    assert adaptive.value == other.value
