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


def check(run: RunConfig, ranks: list[int] | None = None) -> Preflight:
    """Run the preflight. ranks: ranks to examine; None: `chosen_ranks`. Raises ConfigError."""
    start = time.monotonic()
    cpu = time.process_time()
    batches = batches_of(run)
    reports = [report_rank(run, rank, batches) for rank in ranks or chosen_ranks(run)]
    shape = shape_of(run.megatron.transformer, run.gpt)
    worst = max(reports, key=lambda rank: rank.peak)
    fits = worst.peak <= run.preflight.preflight_memory_gb * 10**9
    return Preflight(
        run=run,
        shape=shape,
        ranks=reports,
        batches=batches,
        collectives=collectives_of_step(run, reports[0], batches),
        bubble=bubble(run, batches),
        flops=_flops(run, batches),
        planes=planes(run, shape, batches),
        advice=[] if fits else flags_that_help(run, worst, batches),
        seconds=time.monotonic() - start,
        cpu_s=time.process_time() - cpu,
        host_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def _flops(run: RunConfig, batches: PlannedBatches) -> float:
    lengths, _ = sample_lengths(run, batches.samples)
    prompts = 0 if run.learns_conversations else float(prompt_lengths(run)[0].mean())
    responses = float(lengths.sum()) - prompts * batches.samples
    return step_flops(forward_flops(run.megatron.transformer, run.gpt), lengths.tolist(), responses)


def chosen_ranks(run: RunConfig) -> list[int]:
    """The first rank, the last, and one of the intermediate stage with the most memory: among those
    with the most MoE layers the earliest one, which has the most micro-batches in flight. Ranks of
    one stage differ only in the padding of their shards. With --preflight-all-ranks, the first rank
    of every stage and the last rank."""
    stages = run.parallel.pipeline_model_parallel_size
    of_stage = run.world_size // stages  # in megatron-core's order the pipeline is outermost
    last = run.world_size - 1
    if run.preflight.preflight_all_ranks:
        return sorted({*(stage * of_stage for stage in range(stages)), last})
    chosen = {0, last}
    if stages > 2:
        config = run.megatron.transformer
        freq = config.moe_layer_freq if config.num_moe_experts else None
        experts = moe_layers(freq, config.num_layers)
        each = len(experts) // stages
        counts = [sum(experts[s * each : (s + 1) * each]) for s in range(1, stages - 1)]
        chosen.add((1 + counts.index(max(counts))) * of_stage)
    return sorted(chosen)
