"""Losses of pairs, in float64: against loops written from the papers, and against a step that is
cut otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.losses import compute_policy_loss, token_weights
from slime_like.losses.bradley_terry import BradleyTerryConfig
from slime_like.losses.dpo import DPO_TYPES, DPOConfig
from slime_like.losses.orpo import ORPOConfig, log_odds
from slime_like.losses.total import LossOutput
from tests.unit.losses.loss_cases import value

PAIRS, LENGTH = 4, 7
SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {"dpo_loss_type": kind, "dpo_beta": 0.3} for kind in DPO_TYPES},
    "conservative": {"dpo_beta": 0.5, "dpo_label_smoothing": 0.2},
    "robust, noisy": {"dpo_loss_type": "robust", "dpo_label_smoothing": 0.1, "dpo_beta": 0.4},
    "with nll": {"dpo_nll_coef": 0.7},
}


def step() -> dict[str, Tensor]:
    """[8, 7] of four pairs, with holes in the mask; no answer is empty."""
    g = torch.Generator().manual_seed(11)
    shape = (2 * PAIRS, LENGTH)
    ref = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    mask = torch.rand(shape, generator=g) < 0.7
    mask[:, 2] = True
    noise = torch.randn(shape, generator=g, dtype=torch.float64)
    return {"log_probs": ref + noise, "ref_log_probs": ref, "loss_mask": mask}


def loss_of(rows: list[int], settings: dict[str, Any], **changes: Tensor) -> LossOutput:
    """The part of these rows in the whole step's loss."""
    s = {**step(), **changes}
    u = token_weights("sequence_mean", s["loss_mask"])
    return compute_policy_loss(
        "dpo",
        s["log_probs"][rows],
        s["loss_mask"][rows],
        u[rows],
        ref_log_probs=s["ref_log_probs"][rows],
        config=DPOConfig(**settings),
    )


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def by_loop(log_probs: Tensor, settings: dict[str, Any]) -> tuple[Tensor, list[float]]:
    """The mean over pairs, as the papers have it; and beta h of each pair. Log-probs of whole
    answers are sums of Python over their tokens; as TRL, ipo takes means."""
    s, c = step(), DPOConfig(**settings)
    losses, margins = [], []
    for pair in range(PAIRS):
        ratios, nll = [], torch.zeros((), dtype=torch.float64)
        for answer in (2 * pair, 2 * pair + 1):
            active = [t for t in range(LENGTH) if s["loss_mask"][answer, t]]
            policy = sum(
                (log_probs[answer, t] for t in active), torch.zeros((), dtype=torch.float64)
            )
            ref = sum(float(s["ref_log_probs"][answer, t]) for t in active)
            count = len(active) if c.dpo_loss_type == "ipo" else 1
            ratios.append((policy - ref) / count)
            if answer == 2 * pair:
                nll = -policy / len(active)
        h = ratios[0] - ratios[1]
        right, wrong = 1 / (1 + (-c.dpo_beta * h).exp()), 1 / (1 + (c.dpo_beta * h).exp())
        noise = c.dpo_label_smoothing
        loss = {
            "sigmoid": -(1 - noise) * right.log() - noise * wrong.log(),
            "robust": (-(1 - noise) * right.log() + noise * wrong.log()) / (1 - 2 * noise),
            "hinge": (1 - c.dpo_beta * h).clamp(min=0),
            "ipo": (h - 1 / (2 * c.dpo_beta)) ** 2,
        }[c.dpo_loss_type]
        losses.append(loss + c.dpo_nll_coef * nll)
        margins.append(float((c.dpo_beta * h).detach()))
    return torch.stack(losses).mean(), margins


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_and_its_gradient_are_the_papers(name: str) -> None:
    leaf = step()["log_probs"].requires_grad_()
    output = loss_of(list(range(2 * PAIRS)), SETTINGS[name], log_probs=leaf)
    expected, margins = by_loop(leaf, SETTINGS[name])
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    own, papers = (torch.autograd.grad(x, leaf)[0] for x in (output.loss, expected))
    torch.testing.assert_close(own, papers, rtol=1e-12, atol=1e-15)
    assert float(own.norm()) > 1e-3
    assert value(output.metrics["pair_margin"]) == pytest.approx(sum(margins) / PAIRS, rel=1e-12)
    right = sum(m > 0 for m in margins)
    assert value(output.metrics["pair_accuracy"]) == right / PAIRS and 0 < right < PAIRS


def test_rewards_are_those_of_either_answer() -> None:
    """TRL's rewards/chosen, rewards/rejected: beta times the log-ratio of the whole answer."""
    s = step()
    metrics = loss_of(list(range(2 * PAIRS)), {"dpo_beta": 0.3}).metrics
    rewards = 0.3 * ((s["log_probs"] - s["ref_log_probs"]) * s["loss_mask"]).sum(1)
    for name, expected in (("chosen", rewards[0::2].mean()), ("rejected", rewards[1::2].mean())):
        assert value(metrics[f"{name}_reward"]) == pytest.approx(float(expected), rel=1e-12)
    difference = value(metrics["chosen_reward"]) - value(metrics["rejected_reward"])
    assert value(metrics["pair_margin"]) == pytest.approx(difference, rel=1e-12)


def test_an_untrained_policy_has_the_loss_log_2_and_pulls_the_answers_apart() -> None:
    """Equation 7 at h = 0; the gradient is beta / 2, up for chosen and down for rejected."""
    s = step()
    leaf = s["ref_log_probs"].clone().requires_grad_()
    output = loss_of(list(range(2 * PAIRS)), {"dpo_beta": 0.2}, log_probs=leaf)
    assert output.loss.item() == pytest.approx(math.log(2), rel=1e-12)
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    sign = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(PAIRS)[:, None]
    torch.testing.assert_close(gradient, sign * 0.1 / PAIRS * s["loss_mask"])
    assert value(output.metrics["pair_accuracy"]) == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cut_into_micro_batches_does_not_matter(name: str) -> None:
    """As long as pairs stay together; rows that are masked may hold anything."""
    leaf = step()["log_probs"].requires_grad_()
    poisoned = torch.where(step()["loss_mask"], step()["ref_log_probs"], float("nan"))
    full_one = loss_of(list(range(2 * PAIRS)), SETTINGS[name], log_probs=leaf).loss
    parts = [
        loss_of(rows, SETTINGS[name], log_probs=leaf, ref_log_probs=poisoned).loss
        for rows in ([6, 7, 0, 1], [2, 3], [4, 5])
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), full_one, rtol=1e-12, atol=0)
    for found in torch.autograd.grad(torch.stack(parts).sum(), leaf):
        torch.testing.assert_close(
            found, torch.autograd.grad(full_one, leaf)[0], rtol=1e-12, atol=1e-15
        )


def test_far_answers_stay_finite() -> None:
    """Log-ratios that no exp of them could hold; and none is clamped on its way."""
    s = step()
    for sign in (1.0, -1.0):
        leaf = (s["ref_log_probs"] + sign * 1e4).requires_grad_()
        output = loss_of([0, 1, 2, 3], {"dpo_beta": 1.0}, log_probs=leaf)
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        assert output.loss.isfinite() and gradient.isfinite().all()
    low = s["ref_log_probs"].clone()
    low[0, 2] -= 50.0
    found = loss_of([0, 1], {"dpo_beta": 1.0}, log_probs=low).metrics["chosen_reward"]
    assert value(found) == pytest.approx(-50.0)


def test_what_it_needs_is_reported() -> None:
    s = step()
    u = token_weights("sequence_mean", s["loss_mask"])
    with pytest.raises(ValueError, match="needs ref_log_probs, and the batch has none"):
        compute_policy_loss("dpo", s["log_probs"], s["loss_mask"], u)
    more = {"keep_mask": s["loss_mask"], "ref_log_probs": s["ref_log_probs"]}
    with pytest.raises(ValueError, match="takes no off-policy correction"):
        compute_policy_loss("dpo", s["log_probs"], s["loss_mask"], u, **more)


# --- reward models ---

REWARD_SETTINGS: dict[str, tuple[float, list[float] | None]] = {
    "plain": (0.0, None),
    "centred": (0.3, None),
    "margins": (0.0, [0.0, 0.5, 1.5, 0.2]),
    "centred, margins": (0.1, [0.0, 0.5, 1.5, 0.2]),
}


@pytest.mark.parametrize("name", REWARD_SETTINGS)
def test_bradley_terry_is_the_papers(name: str) -> None:
    """Each answer has one token with a score, at any position; steps may be split between pairs."""
    center, margins = REWARD_SETTINGS[name]
    leaf = step()["log_probs"].requires_grad_()
    last = [3, 6, 0, 5, 2, 2, 6, 1]
    mask = torch.zeros(2 * PAIRS, LENGTH, dtype=torch.bool)
    mask[range(2 * PAIRS), last] = True
    rewards = torch.full((2 * PAIRS, LENGTH), float("nan"), dtype=torch.float64)
    if margins is not None:
        by_answer = torch.tensor(margins, dtype=torch.float64).repeat_interleave(2)
        rewards = by_answer[:, None].expand(-1, LENGTH)
    u = token_weights("sequence_mean", mask)
    config = BradleyTerryConfig(rm_center_coef=center)

    def part(rows: list[int]) -> LossOutput:
        # a batch of the trainer has a column of rewards in any case
        return compute_policy_loss(
            "bradley_terry",
            leaf[rows],
            mask[rows],
            u[rows],
            config=config,
            rewards=None if margins is None else rewards[rows],
        )

    scores = [leaf[i, t] for i, t in enumerate(last)]
    expected = torch.zeros((), dtype=torch.float64)
    for pair in range(PAIRS):
        chosen, rejected = scores[2 * pair], scores[2 * pair + 1]
        m = 0.0 if margins is None else margins[pair]
        expected = expected + (1 + (-(chosen - rejected - m)).exp()).log() / PAIRS
        expected = expected + center * (chosen + rejected) ** 2 / PAIRS
    output = part(list(range(2 * PAIRS)))
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    cut = part([4, 5]).loss + part([2, 3, 6, 7]).loss + part([0, 1]).loss
    torch.testing.assert_close(cut, expected, rtol=1e-12, atol=0)
    own, papers = (torch.autograd.grad(x, leaf)[0] for x in (output.loss, expected))
    torch.testing.assert_close(own, papers, rtol=1e-12, atol=1e-15)
    mean = float(torch.stack(scores[0::2]).mean().detach())
    assert value(output.metrics["chosen_reward"]) == pytest.approx(mean)
    right = sum(bool(a > b) for a, b in zip(scores[0::2], scores[1::2]))
    assert value(output.metrics["pair_accuracy"]) == right / PAIRS and 0 < right < PAIRS


# --- odds ratios ---


def orpo_of(rows: list[int], weight: float, leaf: Tensor, mask: Tensor) -> LossOutput:
    u = token_weights("sequence_mean", mask)
    config = ORPOConfig(orpo_lambda=weight)
    return compute_policy_loss("orpo", leaf[rows], mask[rows], u[rows], config=config)


@pytest.mark.parametrize("weight", [0.1, 2.5])
def test_orpo_is_the_papers(weight: float) -> None:
    """Equations 4 to 7; steps may be split between pairs."""
    mask = step()["loss_mask"]
    lower = torch.tensor([3.0, 0, 0, 1.5, 2.0, 0, 0.5, 2.0], dtype=torch.float64)[:, None]
    leaf = (step()["ref_log_probs"] - 0.01 - lower).requires_grad_()
    losses, odds = [], []
    for pair in range(PAIRS):
        logits, nll = [], torch.zeros((), dtype=torch.float64)
        for answer in (2 * pair, 2 * pair + 1):
            active = [leaf[answer, t] for t in range(LENGTH) if mask[answer, t]]
            mean = sum(active, torch.zeros((), dtype=torch.float64)) / len(active)
            p = mean.exp()
            logits.append((p / (1 - p)).log())
            if answer == 2 * pair:
                nll = -mean
        odds.append(logits[0] - logits[1])
        losses.append(nll - weight * (1 / (1 + (-odds[-1]).exp())).log())
    expected = torch.stack(losses).mean()
    output = orpo_of(list(range(2 * PAIRS)), weight, leaf, mask)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    cut = sum(orpo_of(rows, weight, leaf, mask).loss for rows in ([4, 5, 0, 1], [2, 3], [6, 7]))
    torch.testing.assert_close(cut, expected, rtol=1e-12, atol=0)
    own, papers = (torch.autograd.grad(x, leaf)[0] for x in (output.loss, expected))
    torch.testing.assert_close(own, papers, rtol=1e-11, atol=1e-15)
    found = value(output.metrics["log_odds_ratio"])
    assert found == pytest.approx(float(torch.stack(odds).mean().detach()), rel=1e-12)
    right = sum(bool(x > 0) for x in odds)
    assert value(output.metrics["pair_accuracy"]) == right / PAIRS and 0 < right < PAIRS


def test_orpo_has_the_numbers_of_trl() -> None:
    """What ORPOTrainer of TRL 1.16 reports of a step of two pairs, in float32. Its NLL is over the
    prompt, too: only the odds are compared."""
    means = [-4.819388389587402, -4.640206336975098, -4.812313079833984, -4.654273986816406]
    leaf = torch.tensor(means, dtype=torch.float64)[:, None]
    mask = torch.ones(4, 1, dtype=torch.bool)
    output = orpo_of([0, 1, 2, 3], 0.6, leaf, mask)
    trl = -(-0.4725702106952667 - 0.46562597155570984) / 2
    assert output.loss.item() + (means[0] + means[2]) / 2 == pytest.approx(trl, rel=1e-6)
    assert value(output.metrics["log_odds_ratio"]) == pytest.approx(-0.170111745595932, rel=1e-6)
    assert value(output.metrics["chosen_reward"]) == pytest.approx(-2.8895106315612793)
    assert value(output.metrics["pair_margin"]) == pytest.approx(-0.10116636753082275)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_and_impossible_answers_stay_finite(dtype: torch.dtype) -> None:
    """P = 1 has infinite odds; the gradient is that of the largest P below it, or of the NLL."""
    for low in (-1e4, -1e-12):
        leaf = torch.tensor([[0.0], [low], [low], [0.0]], dtype=dtype, requires_grad=True)
        output = orpo_of([0, 1, 2, 3], 1.0, leaf, torch.ones(4, 1, dtype=torch.bool))
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        assert output.loss.isfinite() and gradient.isfinite().all()
    x = torch.tensor([-1e-3, -0.5, -0.7, -20.0], dtype=torch.float64)
    expected = [math.log(math.exp(a) / -math.expm1(a)) for a in x.tolist()]
    torch.testing.assert_close(log_odds(x), torch.tensor(expected, dtype=torch.float64))
