"""GSPO against loops over sequences, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.losses import policy_losses
from slime_like.losses.gspo import GSPOConfig
from slime_like.losses.sapo import SAPOConfig
from tests.unit.losses.loss_cases import clamp20, gradient, make, value
from tests.unit.losses.sequence_cases import (
    ADVANTAGES,
    LOG_RATIO,
    MASK,
    SEQ_IDS,
    active,
    assert_matches,
    inputs_of,
)


@pytest.mark.parametrize(
    "config",
    [GSPOConfig(), GSPOConfig(eps_clip=3e-4, eps_clip_high=4e-4), GSPOConfig(0.2, 0.3, 1.05)],
)
def test_gspo_is_the_formula(config: GSPOConfig) -> None:
    leaf, inputs = inputs_of()
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    losses, grads, clipped = [0.0] * 12, [0.0] * 12, 0
    for sequence in range(5):
        tokens = active(sequence)
        mean = sum(clamp20(float(LOG_RATIO[t]))[0] for t in tokens) / max(len(tokens), 1)
        s = math.exp(min(mean, 10.0))
        for t in tokens:
            a = float(ADVANTAGES[t])
            losses[t], grads[t] = -a * s, -a * s
            bounded = -a * min(max(s, 1 - config.eps_clip), 1 + high)
            if bounded > losses[t]:
                losses[t], grads[t], clipped = bounded, 0.0, clipped + 1
            if config.eps_clip_c is not None and a < 0 and losses[t] > -config.eps_clip_c * a:
                losses[t], grads[t] = -config.eps_clip_c * a, 0.0
    assert_matches("gspo", config, inputs, leaf, losses, grads)
    metrics = policy_losses.get("gspo").fn(inputs, config).metrics
    assert value(metrics["pg_clipfrac"]) == pytest.approx(clipped / int(MASK.sum())) and clipped > 0


def test_gspo_differentiates_as_the_mean_does_where_the_advantage_is_constant() -> None:
    """GSPO proper: one loss for each sequence, its gradient through the geometric mean."""
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0, 0.3], dtype=torch.float64)[SEQ_IDS]
    leaf, inputs = make(0.01 * LOG_RATIO, advantages, MASK, SEQ_IDS)
    old = inputs.old_log_probs
    assert old is not None
    count = torch.tensor([len(active(i)) for i in range(5)], dtype=torch.float64).clamp(min=1)
    proper = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        if tokens := active(i):
            proper = proper - advantages[tokens[0]] * torch.exp((leaf[tokens] - old[tokens]).mean())
    token_form = (
        inputs.masked(policy_losses.get("gspo").fn(inputs, GSPOConfig(10.0, 10.0)).token_losses)
        / count[SEQ_IDS]
    ).sum()
    torch.testing.assert_close(token_form, proper)
    torch.testing.assert_close(
        torch.autograd.grad(token_form, leaf)[0], torch.autograd.grad(proper, leaf)[0]
    )


def test_gspo_is_capped() -> None:
    leaf, inputs = make(
        torch.full((3,), 19.0, dtype=torch.float64), -torch.ones(3, dtype=torch.float64)
    )
    output = policy_losses.get("gspo").fn(inputs, GSPOConfig())
    assert value(output.metrics["ratio_max"]) == pytest.approx(math.exp(10), rel=1e-5)
    assert torch.equal(
        gradient(policy_losses.get("gspo"), GSPOConfig(), leaf, inputs),
        torch.zeros(3, dtype=torch.float64),
    )


# two answers, one, none and one, of four sequences; sequences 1 and 2 adjoin
TURN_MASK = torch.tensor([c == "1" for c in "0110111111100011"])
TURN_SEQ_IDS = torch.tensor([int(c) for c in "0000000112233444"])
TURNS = [[1, 2], [4, 5, 6], [7, 8], [9, 10], [14, 15]]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gspo", GSPOConfig(10.0, 10.0, gspo_ratio_level="turn")),
        ("sapo", SAPOConfig(0.8, 0.8, "turn")),
    ],
)
def test_the_ratio_of_a_turn_is_that_of_its_tokens(name: str, config: object) -> None:
    """One ratio per answer; an answer as a separate sequence has the same losses and gradients."""
    generator = torch.Generator().manual_seed(3)
    log_ratio, advantages = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    found, grads = [], []
    for cut in (TURN_SEQ_IDS, None):
        rows = torch.tensor([t for turn in TURNS for t in turn])
        ids = torch.tensor([i for i, turn in enumerate(TURNS) for _ in turn])
        if cut is not None:
            rows, ids = torch.arange(16), cut
        leaf, inputs = make(log_ratio[rows], advantages[rows], TURN_MASK[rows], ids)
        losses = inputs.masked(policy_losses.get(name).fn(inputs, config).token_losses)
        active = TURN_MASK[rows]
        found.append(losses[active])
        grads.append(torch.autograd.grad(losses.sum(), leaf)[0][active])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(grads[0], grads[1])
    for i, turn in enumerate(TURNS):
        s = math.exp(sum(float(log_ratio[t]) for t in turn) / len(turn))
        for t, loss in zip(turn, found[0].detach()[sum(map(len, TURNS[:i])) :]):
            a = float(advantages[t])
            gate = 1 / (1 + math.exp(-0.8 * (s - 1)))
            assert float(loss) == pytest.approx(-a * s if name == "gspo" else -a * 4 / 0.8 * gate)
