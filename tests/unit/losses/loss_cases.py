"""Inputs for tests of policy losses, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from slime_like.losses import LossInputs, policy_losses
from slime_like.metrics.typed import Metric, MetricAccumulator
from slime_like.token_columns import TokenColumns

# Preference losses: tests/unit/losses/test_pairs.py and test_kto.py, tests/dist/test_pairs.py.
OF_SINGLE_RESPONSES = [
    name for name, loss in policy_losses.items() if not (loss.pairs or loss.mismatched)
]
POLICY_GRADIENTS = [name for name in OF_SINGLE_RESPONSES if policy_losses.get(name).policy_gradient]


def with_needed(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Any]:
    """These tensors, and numbers in (0, 1) for every per-token input that a registered loss needs
    and that is not among them: a new input is tested without a line in the tables of inputs."""
    singles = [loss for _, loss in policy_losses.items() if not loss.pairs]
    declared = {name for loss in singles for name in loss.needs - {"ref_log_probs"}}
    columns = declared & {field.name for field in fields(TokenColumns)}
    generator = torch.Generator().manual_seed(12)
    others = {
        name: torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
        for name in sorted(columns - tensors.keys())
    }
    return {**tensors, **others}


def make(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    seq_ids: Tensor | None = None,
    **changes: Any,
) -> tuple[Tensor, LossInputs]:
    """Leaf log-probs [T] and inputs with the given log-ratio, to the old policy and to the sampler
    alike. changes: further fields of LossInputs."""
    old = torch.linspace(-3, -0.1, log_ratio.numel(), dtype=torch.float64)
    leaf = (old + log_ratio).clone().requires_grad_()
    seq_ids = torch.zeros_like(log_ratio, dtype=torch.long) if seq_ids is None else seq_ids
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    columns = {
        "advantages": advantages,
        "old_log_probs": old,
        "rollout_log_probs": old,
        "rewards": advantages,
    }
    return leaf, LossInputs(
        log_probs=leaf,
        loss_mask=mask,
        loss_weights=torch.ones_like(log_ratio),
        seq_ids=seq_ids,
        num_seqs=int(seq_ids.max()) + 1,
        **{**with_needed(columns, old), **changes},
    )


def grid() -> tuple[Tensor, Tensor]:
    """Every sign of the advantage with ratios inside and on both sides of any clip range, +-50
    included."""
    log_ratio = torch.tensor(
        [0.0, 0.05, -0.05, 0.5, -0.5, 1.3, -3.0, 2.5, 50.0, -50.0], dtype=torch.float64
    )
    advantages = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)
    return log_ratio.repeat(4), advantages.repeat_interleave(10)


def gradient(loss: Any, config: Any, leaf: Tensor, inputs: LossInputs) -> Tensor:
    """Of the sum of the token losses of active tokens."""
    return torch.autograd.grad(inputs.masked(loss.fn(inputs, config).token_losses).sum(), leaf)[0]


def value(metric: Metric) -> float:
    accumulator = MetricAccumulator()
    accumulator.add({"x": metric})
    return accumulator.reduce()["x"]


def doubles(*columns: list[float]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(column, dtype=torch.float64) for column in columns)


def clamp20(d: float) -> tuple[float, bool]:
    """(log-ratio clamped to +-20, whether its gradient is stopped)."""
    return max(-20.0, min(20.0, d)), abs(d) > 20
