"""PPO in float64 against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.losses import policy_losses
from slime_like.losses.ppo import PPOConfig
from tests.unit.losses.loss_cases import gradient, grid, make, value

PPO = policy_losses.get("ppo")


def ppo_token(
    a: float, log_ratio: float, low: float, high: float, c: float | None
) -> tuple[float, float, bool, bool]:
    """(loss, gradient by the log-prob, clipped, bounded by c) of one token."""
    clamped = max(-20.0, min(20.0, log_ratio))
    r = math.exp(clamped)
    slope = r if clamped == log_ratio else 0.0
    loss, grad = -a * r, -a * slope
    clipped = -a * min(max(r, 1 - low), 1 + high) > loss
    if clipped:
        loss, grad = -a * min(max(r, 1 - low), 1 + high), 0.0
    bounded = c is not None and a < 0 and loss > -c * a
    if bounded:
        assert c is not None
        loss, grad = -c * a, 0.0
    return loss, grad, clipped, bounded


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(),
        PPOConfig(eps_clip_high=0.28),
        PPOConfig(eps_clip=0.0),
        PPOConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0),
        PPOConfig(eps_clip_c=1.1),
    ],
)
def test_ppo_is_the_formula(config: PPOConfig) -> None:
    log_ratio, advantages = grid()
    leaf, inputs = make(log_ratio, advantages)
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    rows = [
        ppo_token(a, d, config.eps_clip, high, config.eps_clip_c)
        for a, d in zip(advantages.tolist(), log_ratio.tolist())
    ]
    losses, grads, clipped, bounded = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows)
    )
    output = PPO.fn(inputs, config)
    torch.testing.assert_close(output.token_losses.detach(), losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(PPO, config, leaf, inputs), grads, rtol=1e-12, atol=1e-12)
    assert value(output.metrics["pg_clipfrac"]) == pytest.approx(float(clipped.mean()))
    if config.eps_clip_c is None:
        assert "pg_clipfrac_lower" not in output.metrics
    else:
        assert value(output.metrics["pg_clipfrac_lower"]) == pytest.approx(float(bounded.mean()))
        assert bounded.any()
