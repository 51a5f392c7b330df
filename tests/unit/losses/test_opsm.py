"""The off-policy sequence mask."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from slime_like.losses import LossTerms, policy_losses, total_loss
from slime_like.losses.gmpo import GMPOConfig
from slime_like.losses.opsm import opsm_keep
from tests.unit.losses.loss_cases import doubles, gradient, make, value
from tests.unit.losses.sequence_cases import ADVANTAGES, KEEP, LOG_RATIO, MASK, active, inputs_of


def test_opsm_drops_what_the_policy_has_moved_away_from() -> None:
    """A < 0 and mean(o - l) > delta, over the original mask; against a loop, and within a loss."""
    leaf, inputs = inputs_of()
    for delta in (1e-4, 0.5, 0.69):
        expected, hit = [True] * 12, set()
        for sequence in range(5):
            tokens = active(sequence)
            moved = sum(-float(LOG_RATIO[t]) for t in tokens) / max(len(tokens), 1)
            for t in tokens:
                if ADVANTAGES[t] < 0 and moved > delta:
                    expected[t] = False
                    hit.add(sequence)
        keep, share = opsm_keep(inputs, delta)
        assert keep[MASK].tolist() == torch.tensor(expected)[MASK].tolist()
        assert value(share) == pytest.approx(len(hit) / 4)
        output = total_loss(
            inputs, policy_losses.get("importance_sampling"), None, LossTerms(opsm_delta=delta)
        )
        plain = gradient(policy_losses.get("importance_sampling"), None, leaf, inputs)
        torch.testing.assert_close(
            torch.autograd.grad(output.loss, leaf)[0],
            torch.where(torch.tensor(expected), plain, 0.0),
        )
        assert value(output.metrics["opsm_clipfrac"]) == pytest.approx(len(hit) / 4)
    assert opsm_keep(inputs, 0.1)[0].sum() == 10 and opsm_keep(inputs, 0.69)[0].all()


def test_opsm_joins_the_mask_of_the_correction_before_the_loss_sees_it() -> None:
    """gmpo's mean is over what is left of both."""
    _leaf, inputs = inputs_of(keep_mask=KEEP)
    gmpo = policy_losses.get("gmpo")
    output = total_loss(inputs, gmpo, GMPOConfig(), LossTerms(opsm_delta=1e-4))
    both = dataclasses.replace(inputs, keep_mask=KEEP & opsm_keep(inputs, 1e-4)[0])
    assert not torch.equal(both.kept, inputs.kept)
    torch.testing.assert_close(output.loss, total_loss(both, gmpo, GMPOConfig(), LossTerms()).loss)


def test_opsm_drops_a_sequence_without_a_finite_divergence() -> None:
    _leaf, inputs = make(*doubles([math.nan, 0.0], [-1.0, -1.0]), seq_ids=torch.tensor([0, 1]))
    assert opsm_keep(inputs, 1.0)[0].tolist() == [False, True]


def test_cross_entropy_takes_no_sequence_mask() -> None:
    _, inputs = inputs_of()
    with pytest.raises(ValueError, match="cross_entropy takes no off-policy sequence mask"):
        total_loss(inputs, policy_losses.get("cross_entropy"), None, LossTerms(opsm_delta=0.1))
