"""What holds for every registered loss: settings, names, metrics, gradients on-policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slime_like.config import check_fields
from slime_like.losses import policy_losses
from slime_like.losses.ppo import PPOConfig
from slime_like.losses.sapo import SAPOConfig
from tests.unit.losses.loss_cases import POLICY_GRADIENTS, gradient, grid, make


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in POLICY_GRADIENTS if name != "dro"),  # it has no default
        ("ppo", {"eps_clip": 0.0, "eps_clip_c": 3.0}),
        ("sapo", {"sapo_tau_pos": 0.3, "sapo_tau_neg": 4.0}),
        ("sapo", {"sapo_tau_pos": 0.3, "sapo_tau_neg": 4.0, "sapo_ratio_level": "sequence"}),
        (
            "cispo",
            {"cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.28, "cispo_anchor": "rollout"},
        ),
        ("dro", {"dro_beta": 0.5}),
        ("dppo", {"dppo_type": "binary_kl"}),
        ("vespo", {"vespo_k_pos": 0.5, "vespo_lambda_neg": 7.0}),
    ],
)
def test_on_policy_the_gradient_is_minus_the_advantage(name: str, settings: dict[str, Any]) -> None:
    """gmpo's for an advantage that is constant in a sequence; clip_cov's where it does not choose:
    nothing is in its range here; luspo's times the length."""
    advantages = torch.tensor([1.5, 1.5, 0.0, -2.0, -2.0], dtype=torch.float64)
    if name != "gmpo":
        advantages += torch.tensor([0.0, -2.2, 0.0, 0.3, 5.0], dtype=torch.float64)
    loss = policy_losses.get(name)
    leaf, inputs = make(
        torch.zeros(5, dtype=torch.float64), advantages, seq_ids=torch.tensor([0, 0, 1, 2, 2])
    )
    inputs = dataclasses.replace(
        inputs, advantages=0.1 * advantages if name == "clip_cov" else advantages
    )
    lengths = torch.tensor([2.0, 2.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(
        gradient(loss, loss.config_type(**settings), leaf, inputs),
        -inputs.required("advantages") * (lengths if name == "luspo" else 1.0),
        rtol=1e-15,
        atol=0,
    )


def test_homogeneous_losses_scale_with_the_advantage() -> None:
    """What lets callers hide weights in advantages."""
    log_ratio, advantages = grid()
    for name, loss in policy_losses.items():
        if loss.homogeneous and "advantages" in loss.needs:
            rewards = torch.ones_like(advantages)
            once, thrice = (
                loss.fn(
                    make(log_ratio, k * advantages, rewards=rewards)[1], loss.config_type()
                ).token_losses
                for k in (1, 3)
            )
            torch.testing.assert_close(thrice, 3 * once, msg=name)


def test_defaults_of_every_loss_are_legal() -> None:
    for name, loss in policy_losses.items():
        for settings in ({}, *loss.alias_defaults.values()):
            assert check_fields(loss.config_type(**settings)) == [], name


def test_boundaries_of_ranges_are_legal() -> None:
    assert check_fields(PPOConfig(eps_clip=0.0, eps_clip_high=0.0, eps_clip_c=1.0001)) == []
    assert check_fields(SAPOConfig(1e-6, 1e-6, "sequence")) == []


def test_names_and_aliases() -> None:
    assert [
        policy_losses.canonical(name) for name in ("regular", "vanilla", "dual_clip", "sft")
    ] == ["ppo", "ppo", "ppo", "cross_entropy"]
    with pytest.raises(
        ValueError, match=r"unknown policy loss 'grpo'.*cross_entropy, .*ppo, .*sapo"
    ):
        policy_losses.get("grpo")
