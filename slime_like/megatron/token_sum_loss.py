"""Losses that are sums, for networks that are trained from outside: what Megatron's schedules call,
with per-token results.

Where a batch has a keep mask, the loss counts those tokens alone, and log-probs are computed for
the others too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slime_like.losses.registry import PolicyLoss
from slime_like.losses.value_loss import ValueInputs, ValueLossConfig, token_value_losses
from slime_like.megatron.forward_step import (
    ForwardStep,
    LogProbHead,
    LossFunc,
    forward,
    loss_inputs,
)
from slime_like.megatron.model.policy import head_weight
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric, MetricAccumulator, masked_mean
from slime_like.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenResults:
    """scores: log-probs of the labels (of K labels: one after another), or a critic's values.
    losses: weighted, with grad. [T] each."""

    scores: tuple[Tensor, ...]
    losses: Tensor
    metrics: Mapping[str, Metric]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return (*(score.detach().float() for score in self.scores), self.losses.detach().float())


@dataclass(frozen=True, slots=True)
class SumLoss:
    """A policy loss with its settings less entropy_coef times the entropy, summed over tokens with
    the weight of each."""

    head: LogProbHead
    policy_loss: PolicyLoss
    config: Any
    entropy_coef: float = 0.0

    def results(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenResults:
        if batch.label_sets is not None:
            return soft_targets(self.head, head_weight(model), batch, hidden)
        log_probs, entropy = self.head.log_probs_and_entropy(hidden, head_weight(model), batch)
        inputs = loss_inputs(batch, log_probs, entropy.detach(), "token", self.head.layout.cp_group)
        if batch.keep_mask is not None:
            inputs = replace(inputs, loss_mask=batch.loss_mask & batch.keep_mask, keep_mask=None)
        output = self.policy_loss.fn(inputs, self.config)
        losses = inputs.masked(output.token_losses)
        if self.entropy_coef:
            losses = losses - self.entropy_coef * inputs.masked(entropy)
        weighted = weigh(losses, inputs.masked(inputs.loss_weights))
        metrics = {**output.metrics, "entropy": masked_mean(entropy.detach(), inputs.loss_mask)}
        return TokenResults((log_probs,), weighted, metrics)


def soft_targets(
    head: LogProbHead, weight: Tensor, batch: MicroBatch, hidden: Tensor
) -> TokenResults:
    """Cross-entropy with K weighted labels at each token, -sum_k w_k log p(label_k). The head is
    passed K times: memory is that of one label."""
    assert batch.label_sets is not None and batch.label_weights is not None
    scores = []
    losses = torch.zeros_like(batch.loss_weights)
    for labels, label_weights in zip(batch.label_sets.unbind(1), batch.label_weights.unbind(1)):
        log_probs, entropy = head.log_probs_and_entropy(
            hidden, weight, replace(batch, labels=labels.unsqueeze(0))
        )
        scores.append(log_probs)
        losses = losses + weigh(-log_probs, torch.where(batch.loss_mask, label_weights, 0.0))
    return TokenResults(
        tuple(scores), losses, {"entropy": masked_mean(entropy.detach(), batch.loss_mask)}
    )


@dataclass(frozen=True, slots=True)
class SumValueLoss:
    """The critic's loss, summed over tokens."""

    layout: ParallelLayout
    config: ValueLossConfig

    def results(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenResults:
        values = torch.where(batch.loss_mask, output[0, :, 0].float(), 0.0)
        assert batch.values is not None and batch.returns is not None
        inputs = ValueInputs(
            values, batch.values, batch.returns, batch.loss_mask, batch.loss_weights
        )
        losses, metrics = token_value_losses(inputs, self.config)
        mean = masked_mean(values.detach(), batch.loss_mask)
        return TokenResults(
            (values,), weigh(losses, batch.loss_weights), {**metrics, "values_mean": mean}
        )


def weigh(losses: Tensor, weights: Tensor) -> Tensor:
    """A token of weight 0 has no loss, whatever its log-prob is."""
    return torch.where(weights != 0, weights * losses, 0.0)


def results_step(
    loss: SumLoss | SumValueLoss, layout: ParallelLayout, metrics: MetricAccumulator
) -> ForwardStep:
    """Forward-only pass: the closure returns the columns of `TokenResults`."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunc]:
        batch = next(batches)

        def collect(output: Tensor, non_loss_data: bool = True) -> tuple[Tensor, ...]:
            results = loss.results(model, batch, output)
            metrics.add(results.metrics)
            return results.columns

        return forward(model, batch, layout), collect

    return step


def sum_training_step(
    loss: SumLoss | SumValueLoss, layout: ParallelLayout, scale: float, metrics: MetricAccumulator
) -> ForwardStep:
    """Forward and loss of one micro-batch. scale: see `gradient_scale`."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunc]:
        batch = next(batches)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            results = loss.results(model, batch, output)
            metrics.add(results.metrics)
            # the schedule divides in place, so the loss it gets is a tensor of its own
            scaled = results.losses.sum() * scale
            return (
                scaled,
                torch.ones((), dtype=torch.int, device=output.device),
                {"columns": results.columns},
            )

        return forward(model, batch, layout), loss_func

    return step
