"""KTO, in float64: against a loop written from the paper, TRL's numbers, and a step that is cut
otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.losses import compute_policy_loss, token_weights
from slime_like.losses.kto import KTOConfig
from slime_like.losses.total import LossOutput
from tests.unit.losses.loss_cases import value

ROWS, LENGTH = 6, 5
GOOD = [True, False, True, True, False, False]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "weights": {"kto_beta": 0.4, "kto_desirable_weight": 1.3, "kto_undesirable_weight": 0.6},
}


def step() -> dict[str, Tensor]:
    """[6, 5] of six answers, with holes in the mask; no answer is empty."""
    g = torch.Generator().manual_seed(3)
    ref = -3 * torch.rand((ROWS, LENGTH), generator=g, dtype=torch.float64)
    mask = torch.rand((ROWS, LENGTH), generator=g) < 0.7
    mask[:, 1] = True
    noise = torch.randn((ROWS, LENGTH), generator=g, dtype=torch.float64)
    good = torch.tensor(GOOD, dtype=torch.float64)[:, None].expand(-1, LENGTH)
    return {"log_probs": ref + noise, "ref_log_probs": ref, "loss_mask": mask, "rewards": good}


def loss_of(
    rows: list[int], settings: dict[str, Any], point: float, **changes: Tensor
) -> LossOutput:
    """The part of these rows in the whole step's loss."""
    s = {**step(), **changes}
    u = token_weights("sequence_mean", s["loss_mask"])
    return compute_policy_loss(
        "kto",
        s["log_probs"][rows],
        s["loss_mask"][rows],
        u[rows],
        ref_log_probs=s["ref_log_probs"][rows],
        rewards=s["rewards"][rows],
        reference_points=torch.full_like(s["ref_log_probs"], point)[rows],
        config=KTOConfig(**settings),
    )


def by_loop(log_probs: Tensor, settings: dict[str, Any], point: float) -> Tensor:
    """The mean of lambda_y - v(x, y), equation 8."""
    s, c = step(), KTOConfig(**settings)
    losses = []
    for row, good in enumerate(GOOD):
        r = torch.zeros((), dtype=torch.float64)
        for t in range(LENGTH):
            if s["loss_mask"][row, t]:
                r = r + log_probs[row, t] - float(s["ref_log_probs"][row, t])
        if good:
            v = c.kto_desirable_weight / (1 + (-c.kto_beta * (r - point)).exp())
            losses.append(c.kto_desirable_weight - v)
        else:
            v = c.kto_undesirable_weight / (1 + (-c.kto_beta * (point - r)).exp())
            losses.append(c.kto_undesirable_weight - v)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("point", [0.0, 1.7])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_and_its_gradient_are_the_papers(name: str, point: float) -> None:
    leaf = step()["log_probs"].requires_grad_()
    output = loss_of(list(range(ROWS)), SETTINGS[name], point, log_probs=leaf)
    expected = by_loop(leaf, SETTINGS[name], point)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    own, papers = (torch.autograd.grad(x, leaf)[0] for x in (output.loss, expected))
    torch.testing.assert_close(own, papers, rtol=1e-12, atol=1e-15)
    assert float(own.norm()) > 1e-3
    assert value(output.metrics["reference_point"]) == pytest.approx(point)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_cut_into_micro_batches_does_not_matter(name: str) -> None:
    """Rows that are masked may hold anything."""
    leaf = step()["log_probs"].requires_grad_()
    poisoned = torch.where(step()["loss_mask"], step()["ref_log_probs"], float("nan"))
    whole = loss_of(list(range(ROWS)), SETTINGS[name], 0.4, log_probs=leaf).loss
    parts = torch.stack(
        [
            loss_of(rows, SETTINGS[name], 0.4, log_probs=leaf, ref_log_probs=poisoned).loss
            for rows in ([5, 0], [2], [1, 3, 4])
        ]
    ).sum()
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    own, found = (torch.autograd.grad(x, leaf)[0] for x in (whole, parts))
    torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-15)


def test_an_untrained_policy_has_half_the_weights_and_pulls_by_their_kind() -> None:
    s = step()
    leaf = s["ref_log_probs"].clone().requires_grad_()
    output = loss_of(list(range(ROWS)), {"kto_beta": 0.2}, 0.0, log_probs=leaf)
    assert output.loss.item() == pytest.approx(0.5, rel=1e-12)
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    sign = torch.tensor([-1.0 if good else 1.0 for good in GOOD], dtype=torch.float64)[:, None]
    torch.testing.assert_close(gradient, sign * 0.2 / 4 / ROWS * s["loss_mask"])


def test_rewards_are_those_of_each_kind() -> None:
    s = step()
    metrics = loss_of(list(range(ROWS)), {"kto_beta": 0.3}, 0.5).metrics
    rewards = 0.3 * ((s["log_probs"] - s["ref_log_probs"]) * s["loss_mask"]).sum(1)
    good = torch.tensor(GOOD)
    for name, of in (("chosen", good), ("rejected", ~good)):
        assert value(metrics[f"{name}_reward"]) == pytest.approx(float(rewards[of].mean()))


def test_far_answers_stay_finite() -> None:
    for sign in (1.0, -1.0):
        leaf = (step()["ref_log_probs"] + sign * 1e4).requires_grad_()
        output = loss_of(list(range(ROWS)), {"kto_beta": 1.0}, 0.0, log_probs=leaf)
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        assert output.loss.isfinite() and gradient.isfinite().all()
        assert 0 <= output.loss.item() <= 1


def test_the_numbers_of_trl() -> None:
    """What KTOTrainer of TRL 1.16 reports of a step of a desirable and an undesirable answer, in
    float32; of two rows, its mismatched answers are the paper's."""
    policy = torch.tensor([[-19.27755355834961], [-44.798362731933594]], dtype=torch.float64)
    rewards = torch.tensor([[0.30569764971733093], [0.6663482785224915]], dtype=torch.float64)
    mask = torch.ones(2, 1, dtype=torch.bool)
    output = compute_policy_loss(
        "kto",
        policy,
        mask,
        token_weights("sequence_mean", mask),
        ref_log_probs=policy - rewards / 0.4,
        rewards=torch.tensor([[1.0], [0.0]], dtype=torch.float64),
        reference_points=torch.full_like(policy, 1.044325828552246),
        config=KTOConfig(kto_beta=0.4, kto_desirable_weight=1.5, kto_undesirable_weight=0.7),
    )
    assert output.loss.item() == pytest.approx(0.5926268696784973, rel=1e-6)
    assert value(output.metrics["chosen_reward"]) == pytest.approx(rewards[0].item())
    assert value(output.metrics["rejected_reward"]) == pytest.approx(rewards[1].item())
