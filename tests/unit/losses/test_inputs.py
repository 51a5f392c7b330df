"""Inputs of losses: sums over sequences, precision and shapes."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.losses import from_padded, policy_losses
from tests.unit.losses.loss_cases import make, value

PPO = policy_losses.get("ppo")
SAPO = policy_losses.get("sapo")


def test_ratio_metrics_are_over_active_tokens() -> None:
    log_ratio = torch.tensor([0.5, -1.0, 30.0, 99.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    _, inputs = make(log_ratio, torch.ones(4, dtype=torch.float64), mask)
    for loss in (PPO, SAPO):
        metrics = loss.fn(inputs, loss.config_type()).metrics
        assert value(metrics["ppo_kl"]) == pytest.approx(-(0.5 - 1.0 + 30.0) / 3, rel=1e-6)
        assert value(metrics["ratio_mean"]) == pytest.approx(
            (math.exp(0.5) + math.exp(-1) + math.exp(20)) / 3, rel=1e-6
        )
        assert value(metrics["ratio_min"]) == pytest.approx(math.exp(-1))
        assert value(metrics["ratio_max"]) == pytest.approx(math.exp(20), rel=1e-6)
        assert value(metrics["ratio_clamp_frac"]) == pytest.approx(1 / 3)


def test_sequence_sums_and_means_follow_the_original_mask() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, False, True])
    _, inputs = make(
        torch.zeros(5, dtype=torch.float64),
        torch.ones(5, dtype=torch.float64),
        mask,
        torch.tensor([0, 0, 0, 1, 2]),
    )
    assert inputs.seq_sum(x).tolist() == [5, 5, 5, 0, 16]
    assert inputs.seq_mean(x).tolist() == [2.5, 2.5, 2.5, 0, 16]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 5.0], dtype=torch.float64)
    assert torch.autograd.grad((weights * inputs.seq_mean(x)).sum(), x)[0].tolist() == [
        55.5,
        0,
        55.5,
        0,
        5,
    ]
    assert torch.autograd.gradcheck(lambda y: inputs.seq_mean(y * y), (x,))


def test_bfloat16_is_upcast_before_the_subtraction() -> None:
    current, old = (
        torch.tensor([-1.0078125], dtype=torch.bfloat16),
        torch.tensor([-1.00003], dtype=torch.float32),
    )
    inputs = from_padded(current[None], torch.ones(1, 1), torch.ones(1, 1), old_log_probs=old[None])
    assert inputs.log_ratio().dtype == torch.float32
    assert float(inputs.log_ratio()) == pytest.approx(-0.0077825, rel=1e-4)


def test_padded_tensors_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), log_probs has \(2, 3\)"):
        from_padded(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3), advantages=torch.ones(2))
