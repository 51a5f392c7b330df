"""What the last pipeline stage computes from the model's output: the losses of policy, critic and
reward model, and forward-only values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.losses.inputs import LossInputs
from slime_like.losses.kl import kl_estimate
from slime_like.losses.registry import PolicyLoss
from slime_like.losses.total import LossOutput, LossTerms, total_loss
from slime_like.losses.value_loss import ValueInputs, ValueLossConfig, value_loss
from slime_like.megatron.model.policy import LogProbHead, head_weight
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.types import MicroBatch, TokenOutput


@dataclass(frozen=True, slots=True)
class Objective:
    """The training objective: policy loss, its settings, and weights of KL and entropy terms."""

    policy_loss: PolicyLoss
    policy_config: object
    terms: LossTerms
    importance_level: str = "token"  # see `LossInputs`

    def compute(self, inputs: LossInputs) -> LossOutput:
        return total_loss(inputs, self.policy_loss, self.policy_config, self.terms)


# (module, micro-batch, hidden states) -> a loss and its metrics
TokenLoss = Callable[[torch.nn.Module, MicroBatch, Tensor], tuple[Tensor, Mapping[str, Metric]]]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Computes an `Objective` from the head's log-probs."""

    head: LogProbHead
    objective: Objective
    # see `TrainBatch`; log-probs and entropies are then returned as columns
    old_is_current: bool = False
    prediction: TokenLoss | None = None  # an additional loss (prediction_loss.py)

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> TokenOutput:
        """Loss and metrics of one micro-batch, as unscaled sums."""
        output = self._policy_loss(model, batch, hidden)
        if self.prediction is None or output.loss is None:
            return output
        loss, metrics = self.prediction(model, batch, hidden)
        return replace(output, loss=output.loss + loss, metrics={**output.metrics, **metrics})

    def _policy_loss(
        self, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor
    ) -> TokenOutput:
        head_batch = with_observed_rows(batch)
        weight = head_weight(model)
        label_log_probs = None
        if batch.label_sets is None:
            log_probs, entropy = self.head.log_probs_and_entropy(hidden, weight, head_batch)
        else:
            log_probs, entropy, label_log_probs = self.head.log_probs_of_sets(
                hidden, weight, head_batch
            )
        objective = self.objective
        columns: tuple[Tensor, ...] = ()
        if self.old_is_current:
            # every ratio is 1 and has the gradient of the log-prob
            batch = replace(batch, old_log_probs=log_probs.detach())
            columns = (log_probs.detach(), entropy.detach())
            if batch.observation_weights is not None:
                columns = tuple(torch.where(batch.loss_mask, c, 0.0) for c in columns)
        if objective.terms.entropy_coef == 0:
            entropy = entropy.detach()  # only reported: no gradient is computed for it
        inputs = loss_inputs(
            batch, log_probs, entropy, objective.importance_level, self.head.layout.cp_group
        )
        inputs = replace(inputs, label_log_probs=label_log_probs)
        output = objective.compute(inputs)
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
            # slime's name, next to those of the correction
            metrics["ois"] = masked_mean(inputs.log_ratio().exp(), batch.loss_mask)
        return TokenOutput(columns, output.loss, metrics)


def with_observed_rows(batch: MicroBatch) -> MicroBatch:
    """Add observation rows with a weight to the rows that the head computes."""
    if batch.observed_rows is None:
        return batch
    return replace(batch, active_rows=batch.observed_rows)


def loss_inputs(
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor | None,
    importance_level: str,
    cp_group: dist.ProcessGroup,
) -> LossInputs:
    """The `LossInputs` of a micro-batch. log_probs, entropy: [T]."""
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


def masked_values(batch: MicroBatch, output: Tensor) -> Tensor:
    """A critic's values [T] float32, 0 at inactive rows. output: [1, T, 1]."""
    return torch.where(batch.loss_mask, output[0, :, 0].float(), 0.0)


def critic_values(model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
    """Column: values."""
    return TokenOutput((masked_values(batch, output),))


def reward_scores(model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
    """Columns of a reward model: scores, and zeros in place of entropies."""
    scores = masked_values(batch, output)
    return TokenOutput((scores, torch.zeros_like(scores)))


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """The loss of a reward model: an `Objective` over the scores of its head."""

    objective: Objective
    layout: ParallelLayout

    def __call__(self, model: torch.nn.Module, batch: MicroBatch, output: Tensor) -> TokenOutput:
        inputs = loss_inputs(batch, output[0, :, 0], None, "token", self.layout.cp_group)
        result = self.objective.compute(inputs)
        return TokenOutput(loss=result.loss, metrics=dict(result.metrics))


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
