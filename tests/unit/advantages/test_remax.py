"""ReMax against a loop over tokens, in float64."""

from __future__ import annotations

import pytest

from slime_like.advantages import (
    AdvantageSettings,
)
from tests.unit.advantages.token_cases import (
    NAN,
    REWARDS,
    estimate,
    penalised,
    returns_by_loop,
    samples,
)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_remax(gamma: float) -> None:
    masks, kl = samples(5)
    greedy = [0.5, 0.5, 1.0, 1.0, 1.0, -2.0, -2.0]
    got = estimate(AdvantageSettings("remax", gamma=gamma, kl_coef=0.1), masks, kl, greedy=greedy)
    for i, (mask, k) in enumerate(zip(masks, kl)):
        returns = returns_by_loop(penalised(REWARDS[i], mask, k, 0.1), mask.tolist(), gamma)
        expected = [
            value - greedy[i] if active else 0.0 for value, active in zip(returns, mask.tolist())
        ]
        assert got.values[i].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_remax_without_greedy_rewards_is_an_error_and_a_bad_one_is_left_out() -> None:
    masks, _ = samples(0)
    with pytest.raises(ValueError, match="reward of a greedy response"):
        estimate(AdvantageSettings("remax"), masks)
    got = estimate(AdvantageSettings("remax"), masks, greedy=[NAN, NAN, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert not got.values[0].any() and got.values[2].any()
    assert got.metrics["reward/greedy_nonfinite"] == 2
