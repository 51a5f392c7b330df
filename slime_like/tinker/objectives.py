"""Losses of the server's policies and critics: sums over tokens, with per-token results. Each is a
`TokenComputation` of megatron/forward_step.py with the terms of losses/total.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.losses.total import apply_weights, token_losses
from slime_like.losses.value_loss import ValueLossConfig, token_value_losses
from slime_like.megatron.model.policy import LogProbHead, head_weight
from slime_like.megatron.objectives import Objective, loss_inputs, masked_values, value_inputs
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.tinker.errors import Refused
from slime_like.tinker.loss_graph import LossGraph, Work, differentiate, evaluate
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


@dataclass(frozen=True, slots=True)
class CustomLosses:
    """A custom loss with its inputs for the datums of a call."""

    graph: LossGraph
    inputs: Sequence[tuple[Tensor, ...]]  # of each datum, on the CPU
    lengths: Sequence[int]  # N of each datum
    widths: Sequence[int] | None  # K of each datum; None: one target per token

    def check(self) -> None:
        """Evaluate all datums with made-up log-probs. Raises Refused, on all ranks alike, for what
        would fail in the pass of a single one."""
        work = Work()
        for i, length in enumerate(self.lengths):
            shape = (length,) if self.widths is None else (length, self.widths[i])
            try:
                self.evaluate(i, torch.full(shape, -1.0), work)
            except Refused as error:
                raise Refused(f"datum {i}: {error}") from None

    def evaluate(
        self, index: int, log_probs: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss [], gradient and metrics of a datum. log_probs, gradient: [N] or [N, K] float32."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = log_probs.detach().clone().requires_grad_()
            loss, metrics = evaluate(self.graph, leaf, self.inputs[index], work)
            gradient = differentiate(self.graph, loss, leaf)
        return loss.detach(), gradient, {key: value.detach() for key, value in metrics.items()}


@dataclass(frozen=True, slots=True)
class CustomSum:
    """The sum of a custom loss over datums.

    The graph runs on log-probs of whole datums, detached and on the CPU; what trains the model is
    sum_t g_t log_prob_t with its gradient g. That is the surrogate that the SDK sends as
    cross-entropy with weights -g where a custom loss runs in the client, so that both give the same
    bits. Columns as `PolicySum`, with the surrogate's terms as losses.
    """

    head: LogProbHead
    losses: CustomLosses

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        weight = head_weight(model)
        if batch.label_sets is None:
            scores, _ = self.head.log_probs_and_entropy(hidden, weight, batch)
        else:
            *_, scores = self.head.log_probs_of_sets(hidden, weight, batch)
        assert batch.datums is not None
        starts = np.concatenate([[0], np.cumsum(self.losses.lengths)[:-1]])
        places = torch.from_numpy(starts).to(scores.device)[batch.datums] + batch.position_ids[0]
        by_datum, present = self._of_whole_datums(batch, scores.detach().float(), places)
        weights = torch.zeros_like(by_datum)
        total = torch.zeros((), dtype=torch.float64)
        sums = {key: torch.zeros((), dtype=torch.float64) for key in self.losses.graph.metric_names}
        for i in present:
            length = self.losses.lengths[i]
            width = slice(None) if self.losses.widths is None else slice(self.losses.widths[i])
            rows = (slice(starts[i], starts[i] + length), width)[: scores.dim()]
            loss, gradient, metrics = self.losses.evaluate(i, by_datum[rows], Work())
            # a loss that is not finite fails the call, even if its gradient is finite
            weights[rows] = -gradient if loss.isfinite() else torch.nan
            total += loss
            for key, value in metrics.items():
                sums[key] += value
        mask = batch.loss_mask if scores.dim() == 1 else batch.loss_mask.unsqueeze(1)
        at_rows = torch.where(mask, weights.to(scores.device)[places], 0.0)
        surrogate = apply_weights(-scores, at_rows)
        if scores.dim() == 1:
            columns: tuple[Tensor, ...] = (scores,)
        else:
            columns = scores.unbind(1)
            surrogate = surrogate.sum(dim=1)
        return summed(columns, surrogate, self._metrics(surrogate, total, sums, len(present)))

    def _of_whole_datums(
        self, batch: MicroBatch, scores: Tensor, places: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Log-probs of the call, concatenated by datum, on the CPU, where the micro-batch has them;
        and the indices of its datums. Collective over context-parallel ranks."""
        assert batch.datums is not None
        active = batch.loss_mask
        table = scores.new_zeros((sum(self.losses.lengths), *scores.shape[1:]))
        table[places[active]] = scores[active]
        counts = scores.new_zeros(len(self.losses.lengths))
        counts[batch.datums[active]] = 1.0
        group = self.head.layout.cp_group
        if group.size() > 1:
            dist.all_reduce(table, group=group)
            dist.all_reduce(counts, group=group)
        return table.cpu(), counts.nonzero().squeeze(1).tolist()

    def _metrics(
        self, surrogate: Tensor, total: Tensor, sums: Mapping[str, Tensor], count: int
    ) -> dict[str, Metric]:
        """Totals of whole datums count once, on the first context-parallel rank."""
        share = 1.0 if self.head.layout.cp_rank == 0 else 0.0
        device = surrogate.device
        number = torch.tensor(count * share, dtype=torch.float64, device=device)
        metrics = {
            "loss": Metric("sum", total.to(device) * share),
            "surrogate_loss": Metric("sum", surrogate.detach().sum(dtype=torch.float64)),
        }
        for key, value in sums.items():
            name, _, kind = key.rpartition(":")
            value = value.to(device) * share
            metrics[name] = (
                Metric("mean", value, number) if kind == "mean" else Metric("sum", value)
            )
        return metrics


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
