"""Losses with a ratio of each token, against loops over tokens written from the formulas, in
float64."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime_like.losses import compute_policy_loss, policy_losses
from slime_like.losses.cispo import CISPOConfig
from slime_like.losses.dppo import DPPOConfig
from slime_like.losses.dro import DROConfig
from slime_like.losses.gpg import GPGConfig
from slime_like.losses.importance_sampling import ImportanceSamplingConfig
from slime_like.losses.ipo import IPOConfig
from slime_like.losses.kimi import KimiConfig
from slime_like.losses.rollout_is import RolloutISConfig
from slime_like.losses.topr import TOPRConfig
from slime_like.losses.up_grpo import UPConfig
from tests.unit.losses.loss_cases import clamp20, doubles, gradient, grid, make, value

# (loss, gradient by the log-prob, whether the metric of clipping counts it) of one token
Token = tuple[float, float, bool]
Formula = Callable[[Any, float, float, float, float], Token]  # config, A, log-prob, anchor, reward


def cispo_token(config: CISPOConfig, a: float, lp: float, o: float, reward: float) -> Token:
    r = math.exp(clamp20(lp - o)[0])
    weight = min(max(r, 1 - config.cispo_eps_clip_low), 1 + config.cispo_eps_clip_high)
    return -weight * a * lp, -weight * a, weight != r


def importance_sampling_token(config: Any, a: float, lp: float, o: float, reward: float) -> Token:
    d, stopped = clamp20(lp - o)
    return -math.exp(d) * a, 0.0 if stopped else -math.exp(d) * a, False


def rollout_is_token(
    config: RolloutISConfig, a: float, lp: float, m: float, reward: float
) -> Token:
    r = math.exp(clamp20(lp - m)[0])
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    inside = 1 - config.eps_clip < r < 1 + high
    return (-r * a * lp, -r * a, False) if inside else (0.0, 0.0, True)


def quadratic_token(config: Any, a: float, lp: float, o: float, reward: float) -> Token:
    coef = config.dro_beta if isinstance(config, DROConfig) else config.kimi_tau
    d, stopped = clamp20(lp - o)
    return -a * lp + coef * d * d / 2, -a + (0.0 if stopped else coef * d), False


def topr_token(config: TOPRConfig, a: float, lp: float, o: float, reward: float) -> Token:
    if reward > 0:
        return -config.topr_positive_weight * a * lp, -config.topr_positive_weight * a, False
    weight = config.topr_negative_weight * min(math.exp(clamp20(lp - o)[0]), 1.0)
    return -weight * a * lp, -weight * a, False


def gpg_token(config: Any, a: float, lp: float, o: float, reward: float) -> Token:
    return -a * lp, -a, False


def dppo_token(config: DPPOConfig, a: float, lp: float, mu: float, reward: float) -> Token:
    p, q = math.exp(lp), math.exp(mu)
    low, high = config.deltas
    if config.dppo_type == "binary_tv":
        dropped = (a > 0 and p - q > high) or (a < 0 and q - p > low)
    else:
        kl = q * (mu - lp) + (1 - q) * math.log((1 - q) / max(-math.expm1(lp), 1e-8))
        dropped = (a > 0 and p > q and kl > high) or (a < 0 and p < q and kl > low)
    if dropped:
        return 0.0, 0.0, True
    return (*importance_sampling_token(None, a, lp, mu, reward)[:2], False)


def ipo_token(config: IPOConfig, a: float, lp: float, mu: float, reward: float) -> Token:
    """As prime-rl has it: the penalty stays where the policy term goes."""
    d, stopped = clamp20(lp - mu)
    penalty, pull = config.ipo_kl_coef * d * d, 0.0 if stopped else 2 * config.ipo_kl_coef * d
    dropped = abs(math.exp(lp) - math.exp(mu)) > config.ipo_threshold
    value, grad, _ = importance_sampling_token(None, a, lp, mu, reward)
    return (penalty, pull, True) if dropped else (value + penalty, grad + pull, False)


def up_token(config: UPConfig, a: float, lp: float, o: float, reward: float) -> Token:
    """Equations 14 and 15: REINFORCE above 0, the old policy's ratio only below."""
    if a > 0:
        return -a, -a, False
    d, stopped = clamp20(lp - o)
    r = math.exp(d)
    if a < 0 and r > config.eps_clip_c:
        return -config.eps_clip_c * a, 0.0, False
    if a < 0 and r < 1 - config.eps_clip:
        return -a * (1 - config.eps_clip), 0.0, True
    return -a * r, 0.0 if stopped else -a * r, False


CASES: list[tuple[str, Any, Formula]] = [
    ("cispo", CISPOConfig(), cispo_token),
    ("cispo", CISPOConfig(0.2, 0.28), cispo_token),
    ("cispo", CISPOConfig(0.5, 1.0, "rollout"), cispo_token),
    ("importance_sampling", ImportanceSamplingConfig(), importance_sampling_token),
    ("rollout_is", RolloutISConfig(), rollout_is_token),
    ("rollout_is", RolloutISConfig(eps_clip=0.5, eps_clip_high=3.0), rollout_is_token),
    ("dro", DROConfig(0.3), quadratic_token),
    ("kimi", KimiConfig(), quadratic_token),
    ("topr", TOPRConfig(), topr_token),
    ("topr", TOPRConfig(0.4, 1.7), topr_token),
    ("gpg", GPGConfig(), gpg_token),
    ("dppo", DPPOConfig(), dppo_token),
    ("dppo", DPPOConfig("binary_tv", 0.01, 0.05), dppo_token),
    ("dppo", DPPOConfig("binary_kl"), dppo_token),
    ("dppo", DPPOConfig("binary_kl", 0.001, 0.01), dppo_token),
    ("ipo", IPOConfig(), ipo_token),
    ("ipo", IPOConfig(ipo_threshold=0.02, ipo_kl_coef=0.3), ipo_token),
    ("up", UPConfig(), up_token),
    ("up", UPConfig(eps_clip=0.02, eps_clip_c=50.0), up_token),
    ("up", UPConfig(eps_clip=0.02, eps_clip_c=1.04), up_token),
]


@pytest.mark.parametrize(
    ("name", "config", "formula"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_a_loss_is_its_formula(name: str, config: Any, formula: Formula) -> None:
    """Values, gradients, and the share that is clipped. The loss that is anchored elsewhere does
    not look at the other anchor."""
    log_ratio, advantages = grid()
    rewards = torch.where(
        torch.arange(40) % 3 == 0, 1.0, torch.where(torch.arange(40) % 3 == 1, 0.0, -2.0)
    )
    leaf, inputs = make(log_ratio, advantages, rewards=rewards)
    anchor = inputs.old_log_probs
    assert anchor is not None
    rollout_anchored = (
        name in ("rollout_is", "dppo", "ipo") or getattr(config, "cispo_anchor", "old") == "rollout"
    )
    other = {"old_log_probs" if rollout_anchored else "rollout_log_probs": anchor + 1}
    leaf, inputs = make(log_ratio, advantages, rewards=rewards, **other)
    tokens = [
        formula(config, *row)
        for row in zip(*(x.tolist() for x in (advantages, leaf.detach(), anchor, rewards)))
    ]
    losses, grads, clipped = doubles(*(list(column) for column in zip(*tokens)))
    output = policy_losses.get(name).fn(inputs, config)
    torch.testing.assert_close(output.token_losses.detach(), losses, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        gradient(policy_losses.get(name), config, leaf, inputs), grads, rtol=1e-11, atol=1e-12
    )
    if "pg_clipfrac" in output.metrics:
        assert 0 < clipped.mean() < 1
        assert value(output.metrics["pg_clipfrac"]) == pytest.approx(float(clipped.mean()))
    else:
        assert not clipped.any()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("importance_sampling", ImportanceSamplingConfig()),
        ("dro", DROConfig(0.7)),
        ("kimi", KimiConfig()),
        ("gpg", GPGConfig()),
    ],
)
def test_smooth_losses_pass_gradcheck(name: str, config: Any) -> None:
    log_ratio, advantages = doubles([0.3, -0.4, 0.01, 1.1], [1.0, -1.0, 2.0, -0.5])
    leaf, inputs = make(log_ratio, advantages)

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        return (
            policy_losses.get(name)
            .fn(dataclasses.replace(inputs, log_probs=log_probs), config)
            .token_losses
        )

    assert torch.autograd.gradcheck(loss, (leaf,))


def test_cispo_metrics() -> None:
    log_ratio, advantages = doubles([0.0, math.log(8.0), math.log(0.5), 3.0], [1.0, 1.0, -1.0, 1.0])
    _, inputs = make(log_ratio, advantages, torch.tensor([True, True, True, False]))
    metrics = policy_losses.get("cispo").fn(inputs, CISPOConfig()).metrics
    expected = {
        "ratio_mean": 9.5 / 3,
        "ratio_clamped_mean": 6.5 / 3,
        "ratio_max": 8.0,
        "ratio_min": 0.5,
    }
    assert {name: value(metrics[f"cispo/{name}"]) for name in expected} == pytest.approx(expected)
    assert value(metrics["pg_clipfrac"]) == pytest.approx(1 / 3)


def test_topr_metrics_count_sequences_and_negative_tokens() -> None:
    log_ratio, rewards = doubles([0.5, -0.5, 0.5, 0.7, 0.2, 9.0], [1.0, 1.0, 1.0, 0.0, 0.0, -1.0])
    mask, seq_ids = (
        torch.tensor([True, True, True, True, True, False]),
        torch.tensor([0, 0, 0, 1, 2, 3]),
    )
    _, inputs = make(log_ratio, torch.ones_like(rewards), mask, seq_ids, rewards=rewards)
    metrics = policy_losses.get("topr").fn(inputs, TOPRConfig()).metrics
    assert value(metrics["topr/positive_frac"]) == pytest.approx(1 / 3)
    assert value(metrics["topr/negative_ratio_above_one"]) == 1


@pytest.mark.parametrize(
    ("name", "config", "coef"), [("dro", DROConfig(0.3), 0.3), ("kimi", KimiConfig(), 0.1)]
)
def test_both_parts_of_the_quadratic_losses_are_reported(
    name: str, config: Any, coef: float
) -> None:
    log_ratio, advantages = doubles([0.5, -1.0], [2.0, -1.0])
    leaf, inputs = make(log_ratio, advantages)
    metrics = policy_losses.get(name).fn(inputs, config).metrics
    assert value(metrics[f"{name}/policy"]) == pytest.approx(
        float(-(advantages * leaf.detach()).mean())
    )
    assert value(metrics[f"{name}/penalty"]) == pytest.approx(coef / 2 * 1.25 / 2)


def test_importance_ratio_is_the_mean_ratio() -> None:
    _, inputs = make(*doubles([math.log(2.0), math.log(4.0)], [1.0, -1.0]))
    assert (
        value(
            policy_losses.get("importance_sampling")
            .fn(inputs, ImportanceSamplingConfig())
            .metrics["importance_ratio"]
        )
        == 3
    )


def test_dppo_falls_back_to_the_old_policy_with_one_warning() -> None:
    log_ratio, advantages = grid()
    dppo = policy_losses.get("dppo")
    with_sampler = dppo.fn(make(log_ratio, advantages)[1], DPPOConfig()).token_losses
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            without = dppo.fn(
                make(log_ratio, advantages, rollout_log_probs=None)[1], DPPOConfig()
            ).token_losses
    assert [("no rollout_log_probs" in str(w.message)) for w in seen] == [True]
    assert torch.equal(with_sampler, without)
    neither = make(log_ratio, advantages, rollout_log_probs=None, old_log_probs=None)[1]
    with (
        pytest.warns(UserWarning, match="no rollout_log_probs"),
        pytest.raises(ValueError, match="needs old_log_probs"),
    ):
        dppo.fn(neither, DPPOConfig())


def test_dppo_near_certain_tokens_stay_finite() -> None:
    """p and q of 1, where log(1 - p) is infinite."""
    for config in (DPPOConfig(), DPPOConfig("binary_kl")):
        zero = torch.zeros(1, 1)
        output = compute_policy_loss(
            "dppo",
            zero.clone().requires_grad_(),
            zero + 1,
            zero + 1,
            config=config,
            advantages=zero + 1,
            rollout_log_probs=zero,
        )
        assert output.loss == -1


def test_aliases_of_dppo_choose_the_divergence() -> None:
    """p = 0.9, q = 0.8: a total variation of 0.1 is inside 0.2; the KL is inside 0.05; with a
    smaller region only the other is."""
    loss = policy_losses.get("dppo")
    made = {
        alias: loss.config_type(**loss.alias_defaults[alias]) for alias in ("dppo_tv", "dppo_kl")
    }
    assert made == {"dppo_tv": DPPOConfig("binary_tv"), "dppo_kl": DPPOConfig("binary_kl")}
    assert DPPOConfig("binary_tv").deltas == (0.2, 0.2) and DPPOConfig("binary_kl").deltas == (
        0.05,
        0.05,
    )
    assert DPPOConfig("binary_kl", 0.1, 0.3).deltas == (0.1, 0.3)
    assert policy_losses.get("kimi15") is policy_losses.get("kimi")


def test_dro_needs_its_beta() -> None:
    _leaf, inputs = make(*grid())
    with pytest.raises(ValueError, match="--dro-beta"):
        policy_losses.get("dro").fn(inputs, DROConfig())


@pytest.mark.parametrize(
    ("config", "needs", "correction"),
    [
        (CISPOConfig(), {"advantages", "old_log_probs"}, "outer"),
        (CISPOConfig(cispo_anchor="rollout"), {"advantages", "rollout_log_probs"}, "masks"),
    ],
)
def test_what_cispo_needs_depends_on_its_anchor(
    config: CISPOConfig, needs: set[str], correction: str
) -> None:
    loss = policy_losses.get("cispo").with_config(config)
    assert (loss.needs, loss.correction) == (needs, correction)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("rollout_is", RolloutISConfig()),
        ("cispo", CISPOConfig(cispo_anchor="rollout")),
        ("dppo", DPPOConfig()),
    ],
)
def test_a_loss_against_the_sampler_takes_masks_and_no_importance_weights(
    name: str, config: Any
) -> None:
    one = torch.ones(1, 2)
    tensors = {"advantages": one, "rollout_log_probs": -one}
    args = ((-one).requires_grad_(), one, one)
    with pytest.raises(ValueError, match=f"{name} takes no importance weights"):
        compute_policy_loss(name, *args, config=config, importance_weights=one, **tensors)
    keep = torch.tensor([[True, False]])
    output = compute_policy_loss(name, *args, config=config, keep_mask=keep, **tensors)
    assert torch.autograd.grad(output.loss, args[0])[0].tolist() == [[-1, 0]]
