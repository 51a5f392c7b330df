"""LUSPO against loops over sequences, in float64."""

from __future__ import annotations

import pytest
import torch

from slime_like.losses import policy_losses
from slime_like.losses.gspo import GSPOConfig
from slime_like.losses.luspo import LUSPOConfig
from tests.unit.losses.loss_cases import make, value
from tests.unit.losses.sequence_cases import LOG_RATIO, MASK, SEQ_IDS, active, inputs_of


@pytest.mark.parametrize("config", [LUSPOConfig(), LUSPOConfig(0.2, 0.3), LUSPOConfig(10.0, 10.0)])
def test_luspo_is_the_mean_over_sequences_of_length_times_loss(config: LUSPOConfig) -> None:
    """The paper's objective, its gradient through the geometric mean, as TRL has it: one advantage
    and one loss for each sequence."""
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.0, -0.3], dtype=torch.float64)
    leaf, inputs = make(0.01 * LOG_RATIO, advantages[SEQ_IDS], MASK, SEQ_IDS)
    old = inputs.old_log_probs
    assert old is not None
    low, high = config.bounds
    paper = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        if tokens := active(i):
            s = torch.exp((leaf[tokens] - old[tokens]).mean())
            clipped = s.clamp(low, high)
            paper = paper + len(tokens) * torch.maximum(
                -advantages[i] * s, -advantages[i] * clipped
            )
    paper = paper / 5
    count = inputs.seq_sum(torch.ones(12, dtype=torch.float64)).clamp(min=1)
    weights = 1 / (5 * count)  # sequence_mean
    output = policy_losses.get("luspo").fn(inputs, config)
    ours = (weights * inputs.masked(output.token_losses)).sum()
    torch.testing.assert_close(ours, paper, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(ours, leaf)[0], torch.autograd.grad(paper, leaf)[0], rtol=1e-13, atol=0
    )
    some_are_clipped = 0 < value(output.metrics["pg_clipfrac"]) < 1
    assert some_are_clipped == (config.eps_clip < 0.01)


def test_luspo_is_gspo_under_a_sum_over_tokens_divided_by_a_constant() -> None:
    _, inputs = inputs_of()
    count = inputs.seq_sum(torch.ones(12, dtype=torch.float64)).clamp(min=1)
    config = GSPOConfig(0.2, 0.3)
    by_length = policy_losses.get("luspo").fn(inputs, LUSPOConfig(0.2, 0.3)).token_losses
    plain = policy_losses.get("gspo").fn(inputs, config).token_losses
    torch.testing.assert_close(inputs.masked(by_length / count), inputs.masked(plain))
