"""What Megatron's schedules call: the forward step, and the `loss_func` closure that turns hidden
states into the scaled loss.

The scale. Per micro-batch the schedule divides a 3-tuple's loss by its token count and by the
number of micro-batches, and DistributedDataParallel averages gradients over dp * cp ranks. Our loss
is already normalised over the whole optimizer step (its token weights hold the denominators), so
all of that is undone once, by `gradient_scale`; `n` is the tensor 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from slime_like.losses.inputs import LossInputs
from slime_like.losses.kl import kl_estimate
from slime_like.losses.registry import PolicyLoss
from slime_like.losses.total import LossTerms, total_loss
from slime_like.megatron.model.policy import head_weight
from slime_like.megatron.ops.attention import packed_rows
from slime_like.megatron.ops.fused_linear_logprob import DEFAULT_CHUNK_SIZE, lean_log_probs
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import masked_mean
from slime_like.types import MicroBatch

LossFunc = Callable[..., Any]
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
    for known in (1.0, float(cp)):
        if abs(factor - known) < 1e-5:
            return known
    raise RuntimeError(
        f"the installed megatron-core scales losses by an unknown factor {factor}; supported: 0.16.x"
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


@dataclass(frozen=True, slots=True)
class Objective:
    """What is optimised: the policy loss with its settings, and the weights of the KL and entropy
    terms."""

    policy_loss: PolicyLoss
    policy_config: Any
    terms: LossTerms
    importance_level: str = "token"  # of LossInputs


@dataclass(frozen=True, slots=True)
class LogProbHead:
    """How hidden states become log-probs: see `lean_log_probs`."""

    vocab_size: int
    temperature: float
    layout: ParallelLayout
    sequence_parallel: bool = False
    chunk_size: int = DEFAULT_CHUNK_SIZE

    def log_probs_and_entropy(
        self, hidden: Tensor, weight: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """[T] each, zero at inactive rows, which never reach the projection. hidden, weight: of the
        last stage, see `PolicyModel`."""
        rows = (
            batch.loss_mask.nonzero().squeeze(1) if batch.active_rows is None else batch.active_rows
        )
        log_probs, entropy = lean_log_probs(
            hidden[0],
            weight,
            batch.labels[0],
            rows=rows,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
            sequence_parallel=self.sequence_parallel,
            chunk_size=self.chunk_size,
            token_sets=batch.token_sets,
        )
        # without an active token too, both depend on hidden states and weight: every rank runs
        # backward
        empty = torch.zeros(batch.loss_mask.numel(), dtype=log_probs.dtype, device=hidden.device)
        return empty.index_copy(0, rows, log_probs), empty.index_copy(0, rows, entropy)


def forward(model: torch.nn.Module, batch: MicroBatch, layout: ParallelLayout) -> Tensor:
    """Hidden states: on the last pipeline stage those that the head takes, [1, T, H]."""
    return model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=packed_rows(batch.cu_seqlens, layout.cp_size, layout.cp_rank),
    )


def log_prob_step(head: LogProbHead) -> ForwardStep:
    """Forward-only pass: the closure returns (log_probs [T], entropy [T])."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunc]:
        batch = next(batches)

        def collect(hidden: Tensor, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
            return head.log_probs_and_entropy(hidden, head_weight(model), batch)

        return forward(model, batch, head.layout), collect

    return step


def training_step(head: LogProbHead, objective: Objective, scale: float) -> ForwardStep:
    """Forward and loss of one micro-batch of an optimizer step."""

    def step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, LossFunc]:
        batch = next(batches)
        return forward(model, batch, head.layout), partial(
            loss_func, model, batch, head, objective, scale
        )

    return step


def loss_func(
    model: torch.nn.Module,
    batch: MicroBatch,
    head: LogProbHead,
    objective: Objective,
    scale: float,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(scaled loss, 1, {"metrics": typed metrics of unscaled sums}) for Megatron's schedules.
    hidden: what `model` gave."""
    log_probs, entropy = head.log_probs_and_entropy(hidden, head_weight(model), batch)
    if objective.terms.entropy_coef == 0:
        entropy = entropy.detach()  # only reported: no gradient is computed for it
    inputs = loss_inputs(
        batch, log_probs, entropy, objective.importance_level, head.layout.cp_group
    )
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
        metrics["ois"] = masked_mean(
            inputs.log_ratio().exp(), batch.loss_mask
        )  # slime's name, beside those of the correction
    # the schedule divides in place, so the loss it gets is a tensor of its own
    return (
        output.loss * scale,
        torch.ones((), dtype=torch.int, device=hidden.device),
        {"metrics": metrics},
    )


def loss_inputs(
    batch: MicroBatch,
    log_probs: Tensor,
    entropy: Tensor,
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
