"""SAPO in float64 against a loop over tokens."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slime_like.losses import policy_losses
from slime_like.losses.sapo import SAPOConfig
from tests.unit.losses.loss_cases import gradient, grid, make, value

SAPO = policy_losses.get("sapo")


def sech2(x: float) -> float:
    return 1 / math.cosh(x) ** 2


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (0.3, 4.0)])
def test_sapo_is_the_formula(tau_pos: float, tau_neg: float) -> None:
    log_ratio, advantages = grid()
    moderate = log_ratio.abs() < 10
    log_ratio, advantages = log_ratio[moderate], advantages[moderate]
    leaf, inputs = make(log_ratio, advantages)
    config = SAPOConfig(sapo_tau_pos=tau_pos, sapo_tau_neg=tau_neg)
    losses, grads, weights, gates = [], [], [], []
    for a, d in zip(advantages.tolist(), log_ratio.tolist()):
        tau, r = (tau_pos if a > 0 else tau_neg), math.exp(d)
        gates.append(1 / (1 + math.exp(-tau * (r - 1))))
        weights.append(r * sech2(tau * (r - 1) / 2))
        losses.append(-a * 4 / tau * gates[-1])
        grads.append(-a * weights[-1])
    output = SAPO.fn(inputs, config)
    expected = torch.tensor([losses, grads], dtype=torch.float64)
    torch.testing.assert_close(output.token_losses.detach(), expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient(SAPO, config, leaf, inputs), expected[1], rtol=1e-9, atol=1e-12
    )
    assert value(output.metrics["sapo_grad_weight"]) == pytest.approx(
        sum(weights) / len(weights), rel=1e-5
    )
    assert value(output.metrics["sapo_gate"]) == pytest.approx(sum(gates) / len(gates), rel=1e-5)
    assert not {"pg_clipfrac", "clip_ratio"} & output.metrics.keys()


def test_sapo_passes_gradcheck() -> None:
    log_ratio, advantages = (
        torch.tensor([0.3, -0.4, 0.0, 1.1], dtype=torch.float64),
        torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=torch.float64),
    )
    leaf, inputs = make(log_ratio, advantages)

    def losses(log_probs: torch.Tensor) -> torch.Tensor:
        return SAPO.fn(
            dataclasses.replace(inputs, log_probs=log_probs), SAPOConfig(0.7, 1.9)
        ).token_losses

    assert torch.autograd.gradcheck(losses, (leaf,))


def test_sapo_at_sequence_level_uses_the_ratio_of_gspo_token() -> None:
    """Value: the geometric mean over the sequence's active tokens. Gradient: each token's own, -A s
    sech^2."""
    log_ratio = torch.tensor([0.4, -0.2, 9.0, 0.1, 0.7, -0.3], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True, True])
    seq_ids = torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = torch.tensor([1.0, -2.0, 5.0, 0.5, 0.5, -0.5], dtype=torch.float64)
    leaf, inputs = make(log_ratio, advantages, mask, seq_ids)
    config = SAPOConfig(0.8, 1.7, "sequence")
    losses, grads = [], []
    for t in range(6):
        members = [j for j in range(6) if mask[j] and seq_ids[j] == seq_ids[t]]
        s = math.exp(sum(float(log_ratio[j]) for j in members) / len(members))
        a = float(advantages[t])
        tau = 0.8 if a > 0 else 1.7
        losses.append(-a * 4 / tau / (1 + math.exp(-tau * (s - 1))) if mask[t] else 0.0)
        grads.append(-a * s * sech2(tau * (s - 1) / 2) if mask[t] else 0.0)
    output = SAPO.fn(inputs, config)
    torch.testing.assert_close(
        inputs.masked(output.token_losses).detach(), torch.tensor(losses, dtype=torch.float64)
    )
    actual = torch.autograd.grad(inputs.masked(output.token_losses).sum(), leaf)[0]
    torch.testing.assert_close(actual, torch.tensor(grads, dtype=torch.float64))


def test_sapo_sequence_ratio_is_capped() -> None:
    """exp(min(., 10)): the gate saturates and nothing overflows."""
    leaf, inputs = make(
        torch.full((3,), 19.0, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    )
    output = SAPO.fn(inputs, SAPOConfig(sapo_ratio_level="sequence"))
    assert value(output.metrics["ratio_max"]) == pytest.approx(math.exp(10), rel=1e-5)
    assert torch.equal(
        torch.autograd.grad(output.token_losses.sum(), leaf)[0], torch.zeros(3, dtype=torch.float64)
    )
