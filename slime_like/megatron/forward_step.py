"""Megatron's forward step: the `loss_func` closure, the loss scale, and running a schedule.

A `TokenComputation` computes losses and columns from a model's output. Those of policy and critic
are here, with losses weighted by the reduction of the optimizer step; tinker/objectives.py has
those of the server. Both use the terms of losses/total.py.

The scale. Per micro-batch the schedule divides a 3-tuple's loss by its token count and by the
number of micro-batches, and DistributedDataParallel averages gradients over dp * cp ranks. Our loss
is already normalised over the whole optimizer step (its token weights hold the denominators), or is
a plain sum, so all of that is undone once, by `gradient_scale`; `n` is the tensor 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import Tensor

from megatron_patches.patch import VERSIONS
from slime_like.losses.inputs import LossInputs
from slime_like.losses.kl import kl_estimate
from slime_like.losses.registry import PolicyLoss
from slime_like.losses.total import LossOutput, LossTerms, total_loss
from slime_like.losses.value_loss import (
    ValueInputs,
    ValueLossConfig,
    value_loss,
)
from slime_like.megatron.model.policy import LogProbHead, head_weight
from slime_like.megatron.ops.attention import packed_rows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric, masked_mean
from slime_like.types import MicroBatch, TokenOutput

# (module, micro-batch, its output) -> TokenOutput. output: what the module returns on the last
# stage, hidden states [1, T, H] of a policy, values [1, T, 1] of a critic.
TokenComputation = Callable[[torch.nn.Module, MicroBatch, Tensor], TokenOutput]
LossFunc = Callable[..., TokenOutput | tuple[Tensor, Tensor, TokenOutput]]
ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[Tensor, LossFunc]]


@cache
def schedule_context_parallel_factor() -> float:
    """The power of cp by which the installed schedule multiplies a 3-tuple's loss: 1 for none, cp
    for megatron-core 0.12.

    Measured on the schedule's own function with a one-element loss, so that another release cannot
    change the gradient unseen.
    """
    num_microbatches, cp, tokens = 4, 3, 5
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    loss, _ = schedules.forward_step_calc_loss(
        model=SimpleNamespace(),
        output_tensor=torch.ones(()),
        loss_func=lambda output: (output.clone(), torch.tensor(tokens, dtype=torch.int), {}),
        config=config,
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=num_microbatches,
        forward_data_store=[],
        cp_group_size=cp,
        is_last_stage=True,
    )
    factor = float(loss) * num_microbatches * tokens
    for expected in (1.0, float(cp)):
        if abs(factor - expected) < 1e-5:
            return expected
    raise RuntimeError(
        f"the installed megatron-core scales losses by an unknown factor {factor}; "
        f"supported: {VERSIONS}"
    )


def gradient_scale(layout: ParallelLayout, num_microbatches: int) -> float:
    """The factor on each micro-batch's loss that undoes Megatron's averaging.

    Our token weights already hold the denominators over the global batch, so the gradient has to be
    the plain sum over micro-batches and ranks.

    Args:
        num_microbatches: of this optimizer step on this rank; the same on all data-parallel ranks.

    Returns:
        num_microbatches * dp * cp, or without cp where the schedule multiplies by it itself.
    """
    # The schedule divides a loss by the number of micro-batches, and DDP averages gradients over
    # dp * cp ranks. Some versions of the schedule multiply by cp first, which cancels its part.
    schedule_factor = layout.cp_size if schedule_context_parallel_factor() > 1 else 1
    return num_microbatches * layout.dp_size * layout.cp_size / schedule_factor


def forward(model: torch.nn.Module, batch: MicroBatch, layout: ParallelLayout) -> Tensor:
    """Run a model chunk: on the last pipeline stage the input of the head, [1, T, H]."""
    return model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=packed_rows(batch.cu_seqlens, layout.cp_size, layout.cp_rank),
    )


def forward_step(
    compute: TokenComputation, layout: ParallelLayout, scale: float | None
) -> ForwardStep:
    """The forward step of one micro-batch. scale: `gradient_scale`; None in a forward-only pass,
    whose closure returns the `TokenOutput` itself."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunc]:
        batch = next(batches)

        def collect(model_output: Tensor, non_loss_data: bool = True) -> TokenOutput:
            return compute(model, batch, model_output)

        def loss_func(model_output: Tensor) -> tuple[Tensor, Tensor, TokenOutput]:
            output = compute(model, batch, model_output)
            assert output.loss is not None and scale is not None
            # a new tensor, because the schedule divides the loss in place
            loss = output.loss * scale
            count = torch.ones((), dtype=torch.int, device=model_output.device)
            return loss, count, replace(output, loss=None)

        return forward(model, batch, layout), collect if scale is None else loss_func

    return step


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    compute: TokenComputation,
    layout: ParallelLayout,
    *,
    forward_only: bool,
) -> list[TokenOutput]:
    """Run all micro-batches through Megatron's schedule. Returns the outputs of `compute` per
    micro-batch on the last pipeline stage, an empty list on others.

    Lengths may differ between micro-batches: with `variable_seq_lengths` pipeline stages exchange
    shapes. The interleaved schedule needs equal lengths (see `packing.pack_all`).
    """
    scale = None if forward_only else gradient_scale(layout, len(micro_batches))
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step(compute, layout, scale),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(int(b.tokens.numel()) for b in micro_batches) * layout.cp_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@dataclass(frozen=True, slots=True)
class Objective:
    """The training objective: policy loss, its settings, and the weights of KL and entropy terms.
    importance_level: see `LossInputs`."""

    policy_loss: PolicyLoss
    policy_config: object
    terms: LossTerms
    importance_level: str = "token"

    def compute(self, inputs: LossInputs) -> LossOutput:
        return total_loss(inputs, self.policy_loss, self.policy_config, self.terms)


# (module, micro-batch, hidden states) -> a loss and its metrics
TokenLoss = Callable[[torch.nn.Module, MicroBatch, Tensor], tuple[Tensor, Mapping[str, Metric]]]


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Computes an `Objective` from the head's log-probs. old_is_current: see `TrainBatch`;
    log-probs and entropies are then returned as columns. prediction: an additional loss
    (prediction_loss.py)."""

    head: LogProbHead
    objective: Objective
    old_is_current: bool = False
    prediction: TokenLoss | None = None

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
        weight, label_log_probs = head_weight(model), None
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
    if batch.observation_weights is None:
        return batch
    active = batch.loss_mask | (batch.observation_weights != 0)
    return replace(batch, active_rows=active.nonzero().squeeze(1))


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
