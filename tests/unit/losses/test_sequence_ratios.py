"""Losses with a ratio of the whole sequence, and the sequence mask, against loops over sequences,
in float64; with and without correction."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.losses import policy_losses
from slime_like.losses.gspo import GSPOConfig
from slime_like.losses.ppo import PPOConfig
from tests.unit.losses.loss_cases import doubles, gradient, make
from tests.unit.losses.sequence_cases import SEQ_IDS, WEIGHTS, inputs_of


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["gmpo", "vespo"])
def test_a_rejected_sequence_may_hold_anything(name: str, poison: float) -> None:
    """The correction drops a sequence whose log-probs are not finite: it gets no gradient, and the
    others keep theirs."""
    rejected = SEQ_IDS == 0
    old = inputs_of()[1].old_log_probs
    assert old is not None
    loss = policy_losses.get(name)
    leaf, clean = inputs_of(keep_mask=~rejected, importance_weights=WEIGHTS)
    expected = gradient(loss, loss.config_type(), leaf, clean)
    spoilt = {
        "old_log_probs": torch.where(rejected, poison, old),
        "importance_weights": torch.where(rejected, poison, WEIGHTS),
    }
    leaf, dirty = inputs_of(keep_mask=~rejected, **spoilt)
    actual = gradient(loss, loss.config_type(), leaf, dirty)
    torch.testing.assert_close(actual, expected)
    assert not actual[rejected].any()


def test_sequence_losses_are_distinguished_from_ppo() -> None:
    """With one token in each sequence gspo is ppo; with more it is not."""
    log_ratio, advantages = doubles([0.3, -0.2, 0.05], [1.0, -1.0, 0.5])
    ppo, gspo = policy_losses.get("ppo"), policy_losses.get("gspo")
    for seq_ids, same in ((torch.arange(3), True), (torch.zeros(3, dtype=torch.long), False)):
        _, inputs = make(log_ratio, advantages, seq_ids=seq_ids)
        by_sequence = gspo.fn(inputs, GSPOConfig(eps_clip=0.2)).token_losses
        assert torch.allclose(ppo.fn(inputs, PPOConfig()).token_losses, by_sequence) == same
