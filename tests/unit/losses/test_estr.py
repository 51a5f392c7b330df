"""The entropy-scaled trust region, against loops written from arXiv 2607.22186, in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slime_like.losses import LossTerms, policy_losses, total_loss
from slime_like.losses.estr import estr_keep
from slime_like.losses.ppo import PPOConfig
from tests.unit.losses.loss_cases import doubles, make, value

LOG_RATIO, ADVANTAGES, ENTROPY = doubles(
    [0.0, 0.05, -0.05, 0.3, -0.3, 0.3, -0.3, 0.9, -0.9, 1.5, 0.01, 0.3],
    [1.0, -1.0, 2.0, -0.5, 1.5, 0.7, -0.7, 1.2, -1.2, 0.4, -0.6, 9.0],
    [0.0, 0.0, 0.002, 0.1, 0.1, 2.0, 2.0, 2.0, 2.0, 2.5, 0.0, 2.0],
)
MASK = torch.arange(12) < 11


@pytest.mark.parametrize("tau", [0.04, 0.2, 0.5, 4.0])
def test_the_objective_is_the_papers(tau: float) -> None:
    """L = -sum M min(r A, clip(r) A) / sum |o|, M = 1[d^2 / (H + 0.01) <= tau], where d and r are
    to the policy that sampled: ppo with the engine's log-probs as the old ones. The gradient by the
    log-prob is -M r A / sum |o|, and 0 where the clip acts."""
    config = PPOConfig(eps_clip=0.2, eps_clip_high=0.28)
    leaf, inputs = make(LOG_RATIO, ADVANTAGES, MASK, entropy=ENTROPY)
    inputs = dataclasses.replace(inputs, loss_weights=torch.full_like(LOG_RATIO, 1 / 11))
    output = total_loss(inputs, policy_losses.get("ppo"), config, LossTerms(estr_threshold=tau))
    (found,) = torch.autograd.grad(output.loss, leaf)
    loss, gradient, dropped = 0.0, [0.0] * 12, 0
    for t in range(11):
        d, a, h = float(LOG_RATIO[t]), float(ADVANTAGES[t]), float(ENTROPY[t])
        if d * d / (h + 0.01) > tau:
            dropped += 1
            continue
        r = math.exp(d)
        clipped = min(max(r, 1 - 0.2), 1 + 0.28)
        loss -= min(r * a, clipped * a) / 11
        gradient[t] = 0.0 if clipped * a < r * a else -r * a / 11
    assert 0 < dropped < 11 or tau == 4.0
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found, torch.tensor(gradient, dtype=torch.float64))
    assert value(output.metrics["estr_mask_ratio"]) == pytest.approx(dropped / 11)


def test_the_bound_follows_the_entropy() -> None:
    """The same log-ratio is noise where the policy is sure and exploration where it is not; nothing
    is dropped twice or brought back."""
    keep, _ = estr_keep(
        make(*doubles([0.3, 0.3, -0.3, -0.3], [1.0] * 4), entropy=doubles([0.01, 1.0, 0.01, 1.0])[0])[1],
        0.2,
        0.01,
    )  # fmt: skip
    assert keep.tolist() == [False, True, False, True]
    rejected = torch.tensor([True, False, True, True])
    _, inputs = make(
        *doubles([0.3, 0.3, -0.3, -0.3], [1.0] * 4),
        entropy=doubles([0.01, 1.0, 0.01, 1.0])[0],
        keep_mask=rejected,
    )
    loss = policy_losses.get("importance_sampling")
    masked = dataclasses.replace(inputs, keep_mask=rejected & keep)
    torch.testing.assert_close(
        total_loss(inputs, loss, None, LossTerms(estr_threshold=0.2)).loss,
        total_loss(masked, loss, None, LossTerms()).loss,
    )


def test_what_is_not_a_number_is_dropped_and_what_is_missing_is_named() -> None:
    _, inputs = make(*doubles([math.nan, 0.0], [1.0, 1.0]), entropy=doubles([1.0, 1.0])[0])
    assert estr_keep(inputs, 1.0, 0.01)[0].tolist() == [False, True]
    with pytest.raises(ValueError, match="the loss needs entropy"):
        estr_keep(dataclasses.replace(inputs, entropy=None), 1.0, 0.01)
    with pytest.raises(ValueError, match="the loss needs rollout_log_probs"):
        estr_keep(dataclasses.replace(inputs, rollout_log_probs=None), 1.0, 0.01)
    with pytest.raises(ValueError, match="cross_entropy takes no entropy-scaled trust region"):
        total_loss(inputs, policy_losses.get("cross_entropy"), None, LossTerms(estr_threshold=0.1))
