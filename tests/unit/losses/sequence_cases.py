"""Sequences of a step for losses with a ratio of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_like.losses import LossInputs, policy_losses
from tests.unit.losses.loss_cases import doubles, gradient, make

SEQ_IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1]).bool()
LOG_RATIO, ADVANTAGES, WEIGHTS = doubles(
    [0.3, 9.0, -0.7, 0.5, 50.0, -50.0, 1.0, 0.1, 0.2, 0.3, -0.9, -0.45],
    [1.5, 1.0, -0.7, 0.9, -2.0, 1.0, 3.0, 0.0, 1.0, 1.0, -0.5, -0.8],
    [0.5, 1.0, 1.5, 0.7, 0.2, 2.0, 1.0, 0.9, 1.0, 1.0, 0.3, 0.6],
)
KEEP = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]).bool()


def inputs_of(**fields: Any) -> tuple[Tensor, LossInputs]:
    return make(LOG_RATIO, ADVANTAGES, MASK, SEQ_IDS, **fields)


def active(sequence: int, keep: Tensor | None = None) -> list[int]:
    return [
        t for t in range(12) if SEQ_IDS[t] == sequence and MASK[t] and (keep is None or keep[t])
    ]


def assert_matches(
    name: str,
    config: Any,
    inputs: LossInputs,
    leaf: Tensor,
    losses: list[float],
    grads: list[float],
) -> None:
    expected, expected_grads = doubles(losses, grads)
    loss = policy_losses.get(name)
    torch.testing.assert_close(
        inputs.masked(loss.fn(inputs, config).token_losses).detach(),
        expected,
        rtol=1e-11,
        atol=1e-12,
    )
    torch.testing.assert_close(
        gradient(loss, config, leaf, inputs), expected_grads, rtol=1e-11, atol=1e-12
    )
