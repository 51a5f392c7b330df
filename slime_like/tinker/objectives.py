"""Losses of the server's policies and critics: sums over tokens, with per-token results. Each is a
`TokenComputation` of megatron/forward_step.py with the terms of losses/total.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.losses.total import apply_weights, token_losses
from slime_like.losses.value_loss import ValueLossConfig, token_value_losses
from slime_like.megatron.model.policy import LogProbHead, head_weight
from slime_like.megatron.objectives import Objective, loss_inputs, masked_values, value_inputs
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.types import MicroBatch, TokenOutput


@dataclass(frozen=True, slots=True)
class PolicySum:
    """A policy `Objective` as a weighted sum over tokens, as the Tinker API defines losses.

    Columns: log-probs of the labels (for K labels, K columns), and the weighted losses. If a batch
    has a keep mask, the loss counts only those tokens, but log-probs are computed for all.
    """

    head: LogProbHead
    objective: Objective

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        weight = head_weight(model)
        if batch.label_sets is not None:
            return soft_targets(self.head, weight, batch, hidden)
        log_probs, entropy = self.head.log_probs_and_entropy(hidden, weight, batch)
        objective = self.objective
        if objective.terms.entropy_coef == 0:
            entropy = entropy.detach()
        inputs = loss_inputs(
            batch, log_probs, entropy, objective.importance_level, self.head.layout.cp_group
        )
        if batch.keep_mask is not None:
            inputs = replace(inputs, loss_mask=batch.loss_mask & batch.keep_mask, keep_mask=None)
        losses, metrics = token_losses(
            inputs, objective.policy_loss, objective.policy_config, objective.terms
        )
        return summed((log_probs,), losses, metrics)


def soft_targets(
    head: LogProbHead, weight: Tensor, batch: MicroBatch, hidden: Tensor
) -> TokenOutput:
    """Cross-entropy with K weighted labels per token, -sum_k w_k log p(label_k)."""
    assert batch.label_weights is not None
    _, entropy, of_sets = head.log_probs_of_sets(hidden, weight, batch)
    label_weights = torch.where(batch.loss_mask.unsqueeze(1), batch.label_weights, 0.0)
    losses = apply_weights(-of_sets, label_weights).sum(dim=1)
    metrics = {"entropy": masked_mean(entropy.detach(), batch.loss_mask)}
    return summed(tuple(of_sets.unbind(1)), losses, metrics)


@dataclass(frozen=True, slots=True)
class ValueSum:
    """The critic's loss as a sum over tokens. Columns: values, and the weighted losses."""

    config: ValueLossConfig

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
        values = masked_values(batch, output)
        losses, metrics = token_value_losses(value_inputs(batch, values), self.config)
        mean = masked_mean(values.detach(), batch.loss_mask)
        return summed(
            (values,), apply_weights(losses, batch.loss_weights), {**metrics, "values_mean": mean}
        )


def summed(
    scores: tuple[Tensor, ...], losses: Tensor, metrics: Mapping[str, Metric]
) -> TokenOutput:
    """Build the output from its columns. scores, losses: [T]; the losses are weighted, require
    grad, and are the last column."""
    columns = tuple(column.detach().float() for column in (*scores, losses))
    return TokenOutput(columns, losses.sum(), metrics)
