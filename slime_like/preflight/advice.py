"""Flags that reduce a component of a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.config import ConfigError
from slime_like.preflight.batches import PlannedBatches, batches_of
from slime_like.preflight.memory import RankReport, server_fraction

STATE = ("weights", "gradients", "optimizer: fp32 parameters", "optimizer: moments", "critic")


def flags_that_help(config: RunConfig, rank: RankReport, batches: PlannedBatches) -> list[str]:
    """Three suggestions: up to two for the largest component of memory, and one for the next."""
    parallel = config.parallel
    transformer = config.megatron.transformer
    tensor = parallel.tensor_model_parallel_size
    tp = f"--tensor-model-parallel-size {2 * tensor}"
    if not transformer.sequence_parallel:
        tp += " --sequence-parallel"
    optimizer = config.megatron.optimizer
    budget = max(batches.tokens // parallel.context_parallel_size // 2, 1)
    split = [tp] if 2 * tensor <= config.preflight.preflight_gpus_per_node else []
    if (transformer.num_moe_experts or 0) >= 2 * parallel.expert_model_parallel_size:
        split.insert(0, f"--expert-model-parallel-size {2 * parallel.expert_model_parallel_size}")
    split += [f"--pipeline-model-parallel-size {stages}" for stages in _deeper(config)]
    state = []
    if config.megatron.transformer.params_dtype.itemsize != 2:
        state.append("--bf16")
    if not config.megatron.ddp.use_distributed_optimizer:
        state.append("--use-distributed-optimizer")
    if not optimizer.use_precision_aware_optimizer:
        state.append("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16")
    state += split
    if not optimizer.optimizer_cpu_offload:
        state.append("--use-precision-aware-optimizer --optimizer-cpu-offload")
    fewer_rows = []
    if transformer.recompute_granularity != "full":
        fewer_rows.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    fewer_rows.append(f"--use-dynamic-batch-size --max-tokens-per-gpu {budget}")
    fewer_rows.append(f"--context-parallel-size {2 * parallel.context_parallel_size}")
    by_term = {
        "activations": fewer_rows,
        "working set": fewer_rows[-2:] + split,
        "head": ["--log-probs-chunk-size 512", *fewer_rows[-2:]],
        "reference": ["--ref-offload"],
        "server": [f"--sglang-mem-fraction-static {server_fraction(config) / 2:g}", *split],
        "messages with weights": ["--update-weight-buffer-size 268435456"],
        "local engine": ["--rollout-engine sglang --colocate"],
    }
    by_term |= dict.fromkeys(STATE, state)
    terms = rank.phases[rank.peak_phase]
    largest_first = sorted(terms, key=lambda name: -terms[name])
    first, *others = [by_term[term] for term in largest_first if by_term.get(term)] or [split]
    suggestions = [*first[:2], *(flags[0] for flags in others), *first[2:]]
    for flags in others:
        suggestions += flags[1:]
    useful = (flags for flags in dict.fromkeys(suggestions) if _helps(config, flags, batches))
    return list(islice(useful, 3))


def _helps(config: RunConfig, flags: str, batches: PlannedBatches) -> bool:
    """Whether the rules take the flags, and a token budget makes the largest micro-batch smaller,
    which has at least the longest sample."""
    planned = with_flags(config, flags.split())
    if planned is None:
        return False
    return "--max-tokens-per-gpu" not in flags or batches_of(planned).tokens < batches.tokens


def _deeper(config: RunConfig) -> list[int]:
    """The next larger pipeline size that divides the number of layers."""
    layers = config.megatron.transformer.num_layers
    stages = config.parallel.pipeline_model_parallel_size
    return [n for n in range(stages + 1, layers + 1) if layers % n == 0][:1]


def with_flags(config: RunConfig, flags: Sequence[str]) -> RunConfig | None:
    """The run with `flags` appended to its command line (later flags win); None if validation
    rejects it."""
    try:
        return parse_args([*config.argv, *flags], config.world_size)
    except ConfigError:
        return None
