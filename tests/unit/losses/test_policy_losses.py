"""Policy losses in float64 against loops over tokens written from the papers' formulas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime_like.config import SettingsError, check_fields
from slime_like.losses import from_padded, policy_losses
from slime_like.losses.cross_entropy import CrossEntropyConfig
from slime_like.losses.ppo import PPOConfig
from slime_like.losses.sapo import SAPOConfig
from tests.unit.losses.loss_cases import POLICY_GRADIENTS, gradient, grid, make, value

PPO, SAPO = policy_losses.get("ppo"), policy_losses.get("sapo")


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


def test_cross_entropy_is_minus_the_log_prob() -> None:
    leaf, inputs = make(
        torch.tensor([0.1, 0.2], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    )
    loss = policy_losses.get("cross_entropy")
    torch.testing.assert_close(loss.fn(inputs, CrossEntropyConfig()).token_losses, -leaf)
    torch.testing.assert_close(
        gradient(loss, CrossEntropyConfig(), leaf, inputs),
        torch.full((2,), -1.0, dtype=torch.float64),
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


@pytest.mark.parametrize(
    ("make_config", "flag", "message"),
    [
        (lambda: PPOConfig(eps_clip=-0.1), "--eps-clip", "must be >= 0"),
        (lambda: PPOConfig(eps_clip_high=-0.1), "--eps-clip-high", "must be >= 0"),
        (lambda: PPOConfig(eps_clip_c=1.0), "--eps-clip-c", "must be > 1"),
        (lambda: PPOConfig(eps_clip=math.nan), "--eps-clip", "must be a finite number"),
        (lambda: SAPOConfig(sapo_tau_pos=0.0), "--sapo-tau-pos", "must be > 0"),
        (lambda: SAPOConfig(sapo_tau_neg=-1.0), "--sapo-tau-neg", "must be > 0"),
        (lambda: SAPOConfig(sapo_ratio_level="prompt"), "--sapo-ratio-level", "token, sequence"),
    ],
)
def test_illegal_settings_are_named(
    make_config: Callable[[], Any], flag: str, message: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        make_config()
    (problem,) = raised.value.problems
    assert problem.flag == flag
    assert message in problem.message


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
