"""Cross-entropy of given tokens."""

from __future__ import annotations

import torch

from slime_like.losses import policy_losses
from slime_like.losses.cross_entropy import CrossEntropyConfig
from tests.unit.losses.loss_cases import gradient, make


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
