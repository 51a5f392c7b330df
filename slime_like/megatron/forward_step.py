"""Megatron's forward step: the `loss_func` closure, the loss scale, and running a schedule.

A `TokenComputation` computes losses and columns from a model's output: objectives.py has those of
the trainer, with losses weighted by the reduction of the optimizer step, tinker/objectives.py those
of the server. Both use the terms of losses/total.py.

The scale. Per micro-batch the schedule divides a 3-tuple's loss by its token count and by the
number of micro-batches, and DistributedDataParallel averages gradients over dp * cp ranks. Our loss
is already normalised over the whole optimizer step (its token weights hold the denominators), or is
a plain sum, so all of that is undone once, by `gradient_scale`; `n` is the tensor 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_patches.known_shapes import known_shapes
from megatron_patches.patch import VERSIONS
from slime_like.megatron.model.hyper_connections import streams_of
from slime_like.megatron.moe import end_routing
from slime_like.megatron.packed_batches import rows_of_pass
from slime_like.megatron.parallel_layout import ParallelLayout
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
    num_microbatches = 4
    cp = 3
    tokens = 5
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


def forward(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Run a model chunk: on the last pipeline stage the input of the head, [1, T, H]."""
    return model(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=rows_of_pass(batch),
    )


def forward_step(compute: TokenComputation, scale: float | None) -> ForwardStep:
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

        return forward(model, batch), collect if scale is None else loss_func

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

    Lengths may differ between micro-batches: with `variable_seq_lengths` each pipeline stage knows
    the shapes of all. The interleaved schedule needs equal lengths (see `packing.pack_all`).
    """
    scale = None if forward_only else gradient_scale(layout, len(micro_batches))
    iterators = [iter(micro_batches) for _ in chunks]
    config = get_model_config(chunks[0])
    share = layout.tp_size if config.sequence_parallel else 1
    rows = [int(batch.tokens.numel()) for batch in micro_batches]
    streams = streams_of(config)
    with known_shapes([(count // share, streams, config.hidden_size) for count in rows]):
        outputs: list[TokenOutput] = get_forward_backward_func()(
            forward_step_func=forward_step(compute, scale),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(rows) * layout.cp_size,
            micro_batch_size=streams,  # of the hidden states that stages exchange
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    end_routing(chunks)
    return outputs
