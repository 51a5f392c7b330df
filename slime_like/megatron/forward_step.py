"""What Megatron's schedules call, and the call of a schedule: the forward step, the `loss_func`
closure, and the scale of the loss.

What is computed from a model's output is a `TokenComputation`; those of policy, critic and server
are in objectives.py.

The scale. Per micro-batch the schedule divides a 3-tuple's loss by its token count and by the
number of micro-batches, and DistributedDataParallel averages gradients over dp * cp ranks. Our loss
is already normalised over the whole optimizer step (its token weights hold the denominators), or is
a plain sum, so all of that is undone once, by `gradient_scale`; `n` is the tensor 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from torch import Tensor

from megatron_patches.patch import VERSIONS
from slime_like.megatron.ops.attention import packed_rows
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.metrics.typed import Metric
from slime_like.types import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What the last pipeline stage computes from a model's output on one micro-batch.

    columns: per-token results without grad, [T] each. loss: 0-d, with grad, not scaled; None in a
    forward-only pass.
    """

    columns: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)


# (module, micro-batch, its output) -> TokenOutput. output: what the module returns on the last
# stage, hidden states [1, T, H] of a policy, values [1, T, 1] of a critic.
TokenComputation = Callable[[torch.nn.Module, MicroBatch, Tensor], TokenOutput]
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
        f"the installed megatron-core scales losses by an unknown factor {factor}; supported: {VERSIONS}"
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
    """Hidden states: on the last pipeline stage those that the head takes, [1, T, H]."""
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

        def collect(output: Tensor, non_loss_data: bool = True) -> TokenOutput:
            return compute(model, batch, output)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, TokenOutput]:
            found = compute(model, batch, output)
            assert found.loss is not None and scale is not None
            # the schedule divides in place, so the loss it gets is a tensor of its own
            loss = found.loss * scale
            count = torch.ones((), dtype=torch.int, device=output.device)
            return loss, count, replace(found, loss=None)

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
    """Run all micro-batches through Megatron's schedule; returns what `compute` gave for each, on
    the last pipeline stage (empty elsewhere).

    Lengths may differ between micro-batches: `variable_seq_lengths` makes pipeline stages exchange
    shapes. The interleaved schedule wants one length (see `packing.pack_all`).
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
