"""The preflight of a command line."""

from __future__ import annotations

import resource
import time

from arguments.hf.moe import moe_layers
from arguments.run_config import RunConfig
from slime_like.preflight.advice import flags_that_help
from slime_like.preflight.batches import PlannedBatches, batches_of, prompt_lengths, sample_lengths
from slime_like.preflight.communication import bubble, collectives_of_step, planes
from slime_like.preflight.flops import forward_flops, step_flops
from slime_like.preflight.memory import report_rank
from slime_like.preflight.report import Preflight
from slime_like.preflight.shape import shape_of


def check(config: RunConfig, ranks: list[int] | None = None) -> Preflight:
    """Run the preflight. ranks: ranks to examine; None: `chosen_ranks`. Raises ConfigError."""
    start = time.monotonic()
    cpu = time.process_time()
    batches = batches_of(config)
    reports = [report_rank(config, rank, batches) for rank in ranks or chosen_ranks(config)]
    shape = shape_of(config.megatron.transformer, config.gpt)
    worst = max(reports, key=lambda rank: rank.peak)
    fits = worst.peak <= config.preflight.preflight_memory_gb * 10**9
    return Preflight(
        config=config,
        shape=shape,
        ranks=reports,
        batches=batches,
        collectives=collectives_of_step(config, reports[0], batches),
        bubble=bubble(config, batches),
        flops=_flops(config, batches),
        planes=planes(config, shape, batches),
        advice=[] if fits else flags_that_help(config, worst, batches),
        seconds=time.monotonic() - start,
        cpu_s=time.process_time() - cpu,
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def _flops(config: RunConfig, batches: PlannedBatches) -> float:
    lengths, _ = sample_lengths(config, batches.samples)
    prompts = 0 if config.learns_conversations else float(prompt_lengths(config)[0].mean())
    responses = float(lengths.sum()) - prompts * batches.samples
    return step_flops(
        forward_flops(config.megatron.transformer, config.gpt), lengths.tolist(), responses
    )


def chosen_ranks(config: RunConfig) -> list[int]:
    """The first rank, the last, and one of the intermediate stage with the most memory: among those
    with the most MoE layers the earliest one, which has the most micro-batches in flight. Ranks of
    one stage differ only in the padding of their shards. With --preflight-all-ranks, the first rank
    of every stage and the last rank."""
    stages = config.parallel.pipeline_model_parallel_size
    of_stage = config.world_size // stages  # in megatron-core's order the pipeline is outermost
    last = config.world_size - 1
    if config.preflight.preflight_all_ranks:
        return sorted({*(stage * of_stage for stage in range(stages)), last})
    chosen = {0, last}
    if stages > 2:
        transformer = config.megatron.transformer
        freq = transformer.moe_layer_freq if transformer.num_moe_experts else None
        experts = moe_layers(freq, transformer.num_layers)
        each = len(experts) // stages
        counts = [sum(experts[s * each : (s + 1) * each]) for s in range(1, stages - 1)]
        chosen.add((1 + counts.index(max(counts))) * of_stage)
    return sorted(chosen)
