"""Running packed micro-batches through Megatron's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_like.megatron.forward_step import ForwardStep
from slime_like.megatron.parallel_layout import ParallelLayout
from slime_like.types import MicroBatch


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    step: ForwardStep,
    layout: ParallelLayout,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run all micro-batches; returns what the loss closure reported for each, on the last pipeline
    stage (empty elsewhere).

    Lengths may differ between micro-batches: `variable_seq_lengths` makes pipeline stages exchange
    shapes. The interleaved schedule wants one length (see `packing.pack_all`).
    """
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=max(int(b.tokens.numel()) for b in micro_batches) * layout.cp_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
