"""Communication volume of a rank per optimizer step and between steps, and the pipeline bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arguments.hf.indexers import indexer_layers, selection_width
from arguments.run_config import RunConfig
from slime_like.megatron.model.hyper_connections import streams_of
from slime_like.preflight.batches import PlannedBatches
from slime_like.preflight.memory import RankReport
from slime_like.preflight.shape import ModelShape

INDEX_BYTES = 200  # per sample, on all ranks: ids, lengths, reward, status, versions
# per token: id (int64), mask, log-probs of engine and trainer, advantage, weight (fp32)
TOKEN_BYTES = 8 + 1 + 4 * 4

NAMES = {  # names of torch's operators
    "allreduce": "all_reduce",
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective."""

    name: str
    dimension: str
    ranks: int
    calls: int
    bytes: int  # size of one rank's buffers for it, per optimizer step


def collectives_of_step(
    config: RunConfig, rank: RankReport, batches: PlannedBatches
) -> list[Collective]:
    """Collectives of an optimizer step. Tensor-, expert- and context-parallel ones are observed in
    a micro-batch, data-parallel ones follow from the sizes of megatron-core's buffers, pipeline
    ones from the size of the activations between stages."""
    collectives = [
        Collective(
            NAMES.get(name, name),
            dimension,
            rank.group_sizes.get(dimension, 0),
            traffic.calls * batches.number,
            traffic.bytes * batches.number,
        )
        for (name, dimension), traffic in sorted(rank.passes.traffic.items())
        if dimension != "data"
    ]
    sizes = rank.group_sizes
    transformer = config.megatron.transformer
    for dimension, (gradients, weights) in rank.reduced.items():
        ranks = sizes[dimension]
        if ranks > 1:
            name = "reduce_scatter" if weights else "all_reduce"
            collectives.append(Collective(name, dimension, ranks, 1, gradients))
        if ranks > 1 and weights:
            collectives.append(Collective("all_gather", dimension, ranks, 1, weights))
    stages = config.parallel.pipeline_model_parallel_size
    if stages > 1:
        share = config.parallel.context_parallel_size
        share *= config.parallel.tensor_model_parallel_size if transformer.sequence_parallel else 1
        row = streams_of(transformer) * transformer.hidden_size
        message = batches.tokens // share * row * transformer.params_dtype.itemsize
        chunks = config.virtual_stages or 1
        neighbours = 2 if chunks > 1 or 0 < rank.stage < stages - 1 else 1
        calls = 2 * batches.number * chunks * neighbours  # activations and their gradients
        name = "send, receive"
        collectives.append(Collective(name, "pipeline", 2, calls, calls * message))
    return collectives


def bubble(config: RunConfig, batches: PlannedBatches) -> float:
    """Pipeline bubble, the idle share of a step: (P - 1) / (V M + P - 1) (arXiv 2104.04473,
    2.2)."""
    stages = config.parallel.pipeline_model_parallel_size
    chunks = config.virtual_stages or 1
    return (stages - 1) / (chunks * batches.number + stages - 1)


@dataclass(frozen=True, slots=True)
class Planes:
    """Data volumes outside of training steps."""

    samples: int  # bytes of a full rollout
    index: int  # bytes of its metadata, which every rank has
    share: int  # of one data-parallel rank
    # weights, messages: bytes and number of messages of a weight update
    weights: int
    messages: int
    checkpoint: int  # bytes on disk


def planes(config: RunConfig, shape: ModelShape, batches: PlannedBatches) -> Planes:
    """Data volumes of the whole job."""
    number = batches.samples * batches.steps
    per_token = TOKEN_BYTES
    if config.rollout.use_rollout_routing_replay:
        per_token += 2 * sum(shape.experts) * shape.topk
    per_sample = batches.mean * per_token
    if config.rollout.use_rollout_indexer_replay:
        transformer = config.megatron.transformer
        width = selection_width(transformer)
        with_choice = max(0, batches.mean - width)
        per_sample += with_choice * 4 * sum(indexer_layers(transformer)) * width
    samples = round(number * per_sample)
    size = config.megatron.transformer.params_dtype.itemsize
    weights = shape.total * size
    optimizer = config.megatron.optimizer
    kept = 8 + (4 if size < 4 else 0)
    if optimizer.use_precision_aware_optimizer:
        kept = optimizer.exp_avg_dtype.itemsize + optimizer.exp_avg_sq_dtype.itemsize
        kept += optimizer.main_params_dtype.itemsize if size < 4 else 0
    saved = weights + (0 if config.checkpoint.no_save_optim else shape.total * kept)
    return Planes(
        samples=samples,
        index=number * INDEX_BYTES,
        share=samples // config.data_parallel_size,
        weights=weights,
        messages=math.ceil(weights / config.sglang.update_weight_buffer_size),
        checkpoint=saved,
    )
