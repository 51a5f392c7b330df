"""GMPO against loops over sequences, in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from slime_like.losses import policy_losses
from slime_like.losses.gmpo import GMPOConfig
from tests.unit.losses.loss_cases import clamp20, doubles, gradient, make, value
from tests.unit.losses.sequence_cases import (
    ADVANTAGES,
    KEEP,
    LOG_RATIO,
    MASK,
    SEQ_IDS,
    WEIGHTS,
    active,
    assert_matches,
    inputs_of,
)


def gmpo_loop(
    config: GMPOConfig, keep: Tensor | None, weights: Tensor | None
) -> tuple[list[float], list[float]]:
    """Token losses, and the gradient of their sum: -rho S / n for each unclipped token."""
    losses, grads = [0.0] * 12, [0.0] * 12
    for sequence in range(5):
        tokens = active(sequence, keep)
        n = max(len(tokens), 1)
        exponent, moving = 0.0, []
        for t in tokens:
            (d, stopped), a = clamp20(float(LOG_RATIO[t])), float(ADVANTAGES[t])
            e = (
                min(d, config.gmpo_eps_high)
                if a > 0
                else max(d, -config.gmpo_eps_low)
                if a < 0
                else 0.0
            )
            exponent += e
            if e == d and not stopped and a != 0:
                moving.append(t)
        rho = math.exp(exponent / n)
        if weights is not None:
            rho *= math.exp(sum(math.log(float(weights[t])) for t in tokens) / n)
        total = sum(float(ADVANTAGES[t]) for t in tokens)
        for t in tokens:
            losses[t] = -float(ADVANTAGES[t]) * rho
        for t in moving:
            grads[t] = -rho * total / n
    return losses, grads


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize(
    "weights",
    [None, WEIGHTS, torch.tensor([0.5, 1.2, 2.0, 1.0, 0.7], dtype=torch.float64)[SEQ_IDS]],
)
@pytest.mark.parametrize("config", [GMPOConfig(), GMPOConfig(0.6, 0.1)])
def test_gmpo_is_the_formula(
    config: GMPOConfig, weights: Tensor | None, keep: Tensor | None
) -> None:
    """One weight for the whole sequence, or the geometric mean of its tokens' weights."""
    leaf, inputs = inputs_of(importance_weights=weights, keep_mask=keep)
    assert_matches("gmpo", config, inputs, leaf, *gmpo_loop(config, keep, weights))


def test_gmpo_passes_gradcheck_inside_its_range() -> None:
    leaf, inputs = make(0.01 * LOG_RATIO, ADVANTAGES, MASK, SEQ_IDS)
    gmpo = policy_losses.get("gmpo")
    assert torch.autograd.gradcheck(
        lambda x: inputs.masked(
            gmpo.fn(dataclasses.replace(inputs, log_probs=x), GMPOConfig()).token_losses
        ),
        (leaf,),
    )


def test_gmpo_counts_a_clip_on_the_side_where_it_acts() -> None:
    log_ratio, advantages = doubles(
        [0.5, 0.5, -0.5, -0.5, 0.5, 0.1], [1.0, -1.0, 1.0, -1.0, 0.0, 1.0]
    )
    metrics = policy_losses.get("gmpo").fn(make(log_ratio, advantages)[1], GMPOConfig()).metrics
    shares = {
        name: value(metrics[name])
        for name in ("pg_clipfrac", "pg_clipfrac_high", "pg_clipfrac_low")
    }
    assert shares == pytest.approx(
        {"pg_clipfrac": 2 / 6, "pg_clipfrac_high": 1 / 6, "pg_clipfrac_low": 1 / 6}
    )


def test_rejected_tokens_leave_gmpos_survivors_with_the_policy_gradient() -> None:
    keep = torch.tensor([True, False, True, False, True])
    advantages = torch.full((5,), 1.7, dtype=torch.float64)
    leaf, inputs = make(torch.zeros(5, dtype=torch.float64), advantages, keep_mask=keep)
    torch.testing.assert_close(
        gradient(policy_losses.get("gmpo"), GMPOConfig(), leaf, inputs),
        torch.where(keep, -advantages, 0.0),
    )
