"""What is computed from a model's output: log-probs and values, and the losses of the policy, of the
critic and of the server. Each is a `TokenComputation` of forward_step.py.

A loss of a run is weighted by the reduction of its optimizer step; one of the server is a sum over
tokens, reported for each of them. The terms of both are those of losses/total.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.losses.inputs import LossInputs
from slime_like.losses.kl import kl_estimate
from slime_like.losses.registry import PolicyLoss
from slime_like.losses.total import LossTerms, token_losses, total_loss, weigh
from slime_like.losses.value_loss import (
    ValueInputs,
    ValueLossConfig,
    token_value_losses,
    value_loss,
)
from slime_like.megatron.forward_step import TokenOutput
from slime_like.megatron.model.policy import head_weight
from slime_like.megatron.ops.fused_linear_logprob import DEFAULT_CHUNK_SIZE, lean_log_probs
from slime_like.megatron.ops.soft_cross_entropy import soft_cross_entropy
from slime_like.megatron.ops.top_tokens import top_tokens
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.types import MicroBatch


@dataclass(frozen=True, slots=True)
class LogProbHead:
    """How hidden states become log-probs: see `lean_log_probs`."""

    vocab_size: int
    temperature: float
    layout: ParallelLayout
    sequence_parallel: bool = False
    chunk_size: int = DEFAULT_CHUNK_SIZE
    squared_probs: bool = False  # a third column of forward-only passes: the sum of their squares
    top_k: int = 0  # further columns: the likeliest tokens

    def log_probs_and_entropy(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """[T] each, zero at inactive rows, which never reach the projection. hidden, weight: of the
        last stage, see `PolicyModel`."""
        log_probs, entropy, *_ = self._columns(hidden, weight, batch, batch.labels[0])
        return log_probs, entropy

    def log_probs_of_sets(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `log_probs_and_entropy`, and the log-probs [T, K] of the batch's label sets."""
        assert batch.label_sets is not None
        labels = torch.cat([batch.labels[0].unsqueeze(1), batch.label_sets], dim=1)
        log_probs, entropy, *_ = self._columns(hidden, weight, batch, labels)
        return log_probs[:, 0], entropy, log_probs[:, 1:]

    def _columns(
        self,
        hidden: Tensor,
        weight: Tensor,
        batch: MicroBatch,
        labels: Tensor,
        *,
        squared: bool = False,
    ) -> tuple[Tensor, ...]:
        """As `log_probs_and_entropy`, of labels [T] or [T, K]; squared: and the sum of squared
        probabilities."""
        rows = active_rows(batch)
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        squares = torch.zeros(rows.numel(), dtype=wide, device=hidden.device) if squared else None
        log_probs, entropy = lean_log_probs(
            hidden[0],
            weight,
            labels,
            rows=rows,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
            token_sets=batch.token_sets,
            squared_out=squares,
        )
        # without an active token too, both depend on hidden states and weight: every rank runs
        # backward
        columns = [log_probs, entropy] if squares is None else [log_probs, entropy, squares]
        return tuple(self._on_all_rows(column, rows, batch) for column in columns)

    def soft_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, batch: MicroBatch
    ) -> Tensor:
        """[T], 0 at inactive rows: with the distributions of the states `targets` [T, H]."""
        rows = active_rows(batch)
        found = soft_cross_entropy(
            hidden[0],
            targets.index_select(0, rows),
            weight,
            vocab_size=self.vocab_size,
            rows=rows,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
        )
        return self._on_all_rows(found, rows, batch)

    def _on_all_rows(self, column: Tensor, rows: Tensor, batch: MicroBatch) -> Tensor:
        """[N] or [N, K] of the active rows -> of all T, 0 elsewhere."""
        empty = column.new_zeros(batch.loss_mask.numel(), *column.shape[1:])
        return empty.index_copy(0, rows, column)

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        """Columns: log-probs and entropies; perhaps sums of squared probabilities; the log-probs of
        label sets, where the batch has them; the likeliest tokens, with `top_k`."""
        weight = head_weight(model)
        if batch.label_sets is not None:
            log_probs, entropy, of_sets = self.log_probs_of_sets(hidden, weight, batch)
            return TokenOutput((log_probs, entropy, *of_sets.unbind(1)))
        labels, squared = batch.labels[0], self.squared_probs
        columns = self._columns(hidden, weight, batch, labels, squared=squared)
        if self.top_k:
            columns += self._top_tokens(hidden, weight, batch).to(columns[0].dtype).unbind(1)
        return TokenOutput(columns)

    def _top_tokens(self, hidden: Tensor, weight: Tensor, batch: MicroBatch) -> Tensor:
        """[T, top_k] int64, 0 at inactive rows."""
        rows = active_rows(batch)
        tokens = top_tokens(
            hidden[0],
            weight,
            k=self.top_k,
            vocab_size=self.vocab_size,
            rows=rows,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
        )
        return self._on_all_rows(tokens, rows, batch)


def active_rows(batch: MicroBatch) -> Tensor:
    """[N] int64: the rows that the head computes."""
    if batch.active_rows is None:
        return batch.loss_mask.nonzero().squeeze(1)
    return batch.active_rows


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised: the policy loss with its settings, and the weights of the KL and entropy
    terms. importance_level: of LossInputs."""

    policy_loss: PolicyLoss
    policy_config: Any
    terms: LossTerms
    importance_level: str = "token"


# (module, micro-batch, hidden states) -> a loss and its metrics
TokenLoss = Callable[[torch.nn.Module, MicroBatch, Tensor], tuple[Tensor, Mapping[str, Metric]]]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """An `Objective` over the head's log-probs: the loss of a run's policy. old_is_current: see
    `TrainBatch`. Columns: then, log-probs and entropies. prediction: a loss that is added
    (prediction_loss.py)."""

    head: LogProbHead
    objective: Objective
    old_is_current: bool = False
    prediction: TokenLoss | None = None

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        """Metrics are those of unscaled sums."""
        found = self._of_policy(model, batch, hidden)
        if self.prediction is None or found.loss is None:
            return found
        loss, metrics = self.prediction(model, batch, hidden)
        return replace(found, loss=found.loss + loss, metrics={**found.metrics, **metrics})

    def _of_policy(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        head_batch = with_observed_rows(batch)
        weight, of_sets = head_weight(model), None
        if batch.label_sets is None:
            log_probs, entropy = self.head.log_probs_and_entropy(hidden, weight, head_batch)
        else:
            log_probs, entropy, of_sets = self.head.log_probs_of_sets(hidden, weight, head_batch)
        objective = self.objective
        columns: tuple[Tensor, ...] = ()
        if self.old_is_current:
            # every ratio is 1, and its gradient that of the log-prob
            batch = replace(batch, old_log_probs=log_probs.detach())
            columns = (log_probs.detach(), entropy.detach())
            if batch.observation_weights is not None:
                columns = tuple(torch.where(batch.loss_mask, c, 0.0) for c in columns)
        if objective.terms.entropy_coef == 0:
            entropy = entropy.detach()  # only reported: no gradient is computed for it
        inputs = loss_inputs(
            batch, log_probs, entropy, objective.importance_level, self.head.layout.cp_group
        )
        inputs = replace(inputs, label_log_probs=of_sets)
        output = total_loss(inputs, objective.policy_loss, objective.policy_config, objective.terms)
        metrics = dict(output.metrics)
        if batch.old_log_probs is not None:
            metrics["log_ratio_abs"] = masked_mean(
                (log_probs - batch.old_log_probs).abs(), batch.loss_mask
            )
        if batch.ref_log_probs is not None:
            metrics["kl_k3"] = masked_mean(
                kl_estimate("k3", log_probs, batch.ref_log_probs), batch.loss_mask
            )
        if batch.keep_mask is not None and batch.old_log_probs is not None:
            # slime's name, beside those of the correction
            metrics["ois"] = masked_mean(inputs.log_ratio().exp(), batch.loss_mask)
        return TokenOutput(columns, output.loss, metrics)


def with_observed_rows(batch: MicroBatch) -> MicroBatch:
    """With the rows of observations among those that the head computes, where they have weights."""
    if batch.observation_weights is None:
        return batch
    wanted = batch.loss_mask | (batch.observation_weights != 0)
    return replace(batch, active_rows=wanted.nonzero().squeeze(1))


def loss_inputs(
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    importance_level: str,
    cp_group: dist.ProcessGroup,
) -> LossInputs:
    """The view of a micro-batch that losses get. log_probs, entropy: [T]."""
    shared = {f.name for f in fields(LossInputs)} & {f.name for f in fields(MicroBatch)}
    constants = {name: getattr(batch, name) for name in shared}
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        num_seqs=batch.num_seqs,
        importance_level=importance_level,
        cp_group=cp_group if cp_group.size() > 1 else None,
        **constants,
    )


def values_of(batch: MicroBatch, output: Tensor) -> Tensor:
    """A critic's values [T] float32, 0 at inactive rows. output: [1, T, 1]."""
    return torch.where(batch.loss_mask, output[0, :, 0].float(), 0.0)


def critic_values(model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
    """Column: values."""
    return TokenOutput((values_of(batch, output),))


def reward_scores(model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
    """Columns of a reward model in the place of log-probs and entropies: scores, and zeros."""
    scores = values_of(batch, output)
    return TokenOutput((scores, torch.zeros_like(scores)))


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """The loss of a reward model: an `Objective` over the scores of its head."""

    objective: Objective
    layout: ParallelLayout

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
        inputs = loss_inputs(batch, output[0, :, 0], None, "token", self.layout.cp_group)
        objective = self.objective
        found = total_loss(inputs, objective.policy_loss, objective.policy_config, objective.terms)
        return TokenOutput(loss=found.loss, metrics=dict(found.metrics))


def value_inputs(batch: MicroBatch, values: Tensor) -> ValueInputs:
    assert batch.values is not None and batch.returns is not None
    return ValueInputs(values, batch.values, batch.returns, batch.loss_mask, batch.loss_weights)


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The loss of a run's critic."""

    config: ValueLossConfig

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
        result = value_loss(value_inputs(batch, output[0, :, 0]), self.config)
        return TokenOutput(loss=result.loss, metrics=dict(result.metrics))


@dataclass(frozen=True, slots=True)
class PolicySum:
    """An `Objective` summed over tokens with the weight of each: the loss of a server's policy.

    Columns: log-probs of the labels (of K labels: one after another), and the weighted losses.
    Where a batch has a keep mask, the loss counts those tokens alone, and log-probs are computed
    for the others too.
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
    """Cross-entropy with K weighted labels at each token, -sum_k w_k log p(label_k)."""
    assert batch.label_weights is not None
    _, entropy, of_sets = head.log_probs_of_sets(hidden, weight, batch)
    label_weights = torch.where(batch.loss_mask.unsqueeze(1), batch.label_weights, 0.0)
    losses = weigh(-of_sets, label_weights).sum(dim=1)
    metrics = {"entropy": masked_mean(entropy.detach(), batch.loss_mask)}
    return summed(tuple(of_sets.unbind(1)), losses, metrics)


@dataclass(frozen=True, slots=True)
class ValueSum:
    """The critic's loss summed over tokens. Columns: values, and the weighted losses."""

    config: ValueLossConfig

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
        values = values_of(batch, output)
        losses, metrics = token_value_losses(value_inputs(batch, values), self.config)
        mean = masked_mean(values.detach(), batch.loss_mask)
        return summed(
            (values,), weigh(losses, batch.loss_weights), {**metrics, "values_mean": mean}
        )


def summed(
    scores: tuple[Tensor, ...], losses: Tensor, metrics: Mapping[str, Metric]
) -> TokenOutput:
    """scores, losses: [T]; the losses are weighted, with grad, and are the last column."""
    columns = tuple(column.detach().float() for column in (*scores, losses))
    return TokenOutput(columns, losses.sum(), metrics)
