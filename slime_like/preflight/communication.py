"""Communication volume of a rank per optimizer step and between steps, and the pipeline bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arguments.run_config import RunConfig
from slime_like.preflight.batches import Batches
from slime_like.preflight.memory import RankReport
from slime_like.preflight.shape import Shape

INDEX_BYTES = 200  # of a sample, on all ranks: ids, lengths, reward, status, versions
# of a token: its id (int64), mask, log-probs of sampler and trainer, advantage, weight (fp32)
TOKEN_BYTES = 8 + 1 + 4 * 4

NAMES = {  # of torch's operators
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """bytes: that one rank has in its buffers for it, in one optimizer step."""

    name: str
    dimension: str
    ranks: int
    calls: int
    bytes: int


def collectives_of_step(run: RunConfig, rank: RankReport, batches: Batches) -> list[Collective]:
    """Tensor-, expert- and context-parallel ones as a micro-batch was seen to call them;
    data-parallel ones by the sizes of megatron-core's buffers; the pipeline's by the size of what
    stages exchange."""
    found = [
        Collective(
            NAMES.get(name, name),
            dimension,
            rank.group_sizes.get(dimension, 0),
            traffic.calls * batches.number,
            traffic.bytes * batches.number,
        )
        for (name, dimension), traffic in sorted(rank.traffic.items())
        if dimension != "data"
    ]
    sizes, config = rank.group_sizes, run.megatron.transformer
    for dimension, (gradients, weights) in rank.reduced.items():
        ranks = sizes[dimension]
        if ranks > 1:
            name = "reduce_scatter" if weights else "all_reduce"
            found.append(Collective(name, dimension, ranks, 1, gradients))
        if ranks > 1 and weights:
            found.append(Collective("all_gather", dimension, ranks, 1, weights))
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1:
        share = run.parallel.context_parallel_size
        share *= run.parallel.tensor_model_parallel_size if config.sequence_parallel else 1
        message = batches.tokens // share * config.hidden_size * config.params_dtype.itemsize
        chunks = run.virtual_stages or 1
        neighbours = 2 if chunks > 1 or 0 < rank.stage < stages - 1 else 1
        calls = 2 * batches.number * chunks * neighbours  # activations and their gradients
        found.append(Collective("send, receive", "pipeline", 2, calls, calls * message))
    return found


def bubble(run: RunConfig, batches: Batches) -> float:
    """Share of a step in which a stage waits: (P - 1) / (V M + P - 1) (arXiv 2104.04473, 2.2)."""
    stages, chunks = run.parallel.pipeline_model_parallel_size, run.virtual_stages or 1
    return (stages - 1) / (chunks * batches.number + stages - 1)


@dataclass(frozen=True, slots=True)
class Planes:
    """samples: bytes of all of a rollout, and index: of what every rank knows of them. share: of
    one data-parallel rank. weights: bytes of an update, and messages. checkpoint: on disk."""

    samples: int
    index: int
    share: int
    weights: int
    messages: int
    checkpoint: int


def planes(run: RunConfig, shape: Shape, batches: Batches) -> Planes:
    """Of the whole job."""
    number = batches.samples * batches.steps
    per_token = TOKEN_BYTES
    if run.rollout.use_rollout_routing_replay:
        per_token += 2 * sum(shape.experts) * shape.topk
    samples = round(number * batches.mean * per_token)
    size = run.megatron.transformer.params_dtype.itemsize
    weights = shape.total * size
    optimizer = run.megatron.optimizer
    kept = 8 + (4 if size < 4 else 0)
    if optimizer.use_precision_aware_optimizer:
        kept = optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize
        kept += optimizer.main_params_dtype.itemsize if size < 4 else 0
    saved = weights + (0 if run.checkpoint.no_save_optim else shape.total * kept)
    return Planes(
        samples=samples,
        index=number * INDEX_BYTES,
        share=samples // run.data_parallel_size,
        weights=weights,
        messages=math.ceil(weights / run.sglang.update_weight_buffer_size),
        checkpoint=saved,
    )
