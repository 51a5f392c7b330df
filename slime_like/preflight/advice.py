"""Flags that make a term of a rank's memory smaller."""

from __future__ import annotations

from collections.abc import Sequence

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.config import ConfigError
from slime_like.preflight.batches import Batches
from slime_like.preflight.memory import RankReport, server_fraction

STATE = ("weights", "gradients", "optimizer: fp32 parameters", "optimizer: moments", "reference")


def flags_that_help(run: RunConfig, rank: RankReport, batches: Batches) -> list[str]:
    """Three suggestions: up to two for the largest term of memory, and one for the next."""
    parallel, transformer = run.parallel, run.megatron.transformer
    tensor = parallel.tensor_model_parallel_size
    tp = f"--tensor-model-parallel-size {2 * tensor}"
    if not transformer.sequence_parallel:
        tp += " --sequence-parallel"
    distributed = run.megatron.ddp.use_distributed_optimizer
    optimizer = run.megatron.optimizer
    budget = max(batches.tokens // parallel.context_parallel_size // 2, 1)
    cuts = [tp] if 2 * tensor <= run.preflight.preflight_gpus_per_node else []
    if (transformer.num_moe_experts or 0) >= 2 * parallel.expert_model_parallel_size:
        cuts.insert(0, f"--expert-model-parallel-size {2 * parallel.expert_model_parallel_size}")
    cuts += [f"--pipeline-model-parallel-size {stages}" for stages in _deeper(run)]
    state = [] if run.megatron.transformer.params_dtype.itemsize == 2 else ["--bf16"]
    state += [] if distributed else ["--use-distributed-optimizer"]
    precise = ["--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"]
    state += [] if optimizer.use_precision_aware_optimizer else precise
    state += cuts
    if not optimizer.optimizer_cpu_offload:
        state.append("--use-precision-aware-optimizer --optimizer-cpu-offload")
    rows = []
    if transformer.recompute_granularity != "full":
        rows.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )
    rows.append(f"--use-dynamic-batch-size --max-tokens-per-gpu {budget}")
    rows.append(f"--context-parallel-size {2 * parallel.context_parallel_size}")
    by_term = {
        "activations": rows,
        "working set": rows[-2:] + cuts,
        "head": ["--log-probs-chunk-size 512", *rows[-2:]],
        "reference": ["--ref-offload"],
        "server": [f"--sglang-mem-fraction-static {server_fraction(run) / 2:g}", *cuts],
        "messages with weights": ["--update-weight-buffer-size 268435456"],
        "local engine": ["--rollout-engine sglang --rollout-num-gpus 8 --colocate"],
    }
    terms = rank.phases[rank.peak_phase]
    known = [
        by_term.get(term, state if term in STATE or term == "critic" else [])
        for term in sorted(terms, key=lambda name: -terms[name])
    ]
    first, *others = [flags for flags in known if flags] or [cuts]
    found = [*first[:2], *(flags[0] for flags in others), *first[2:]]
    found += [flag for flags in others for flag in flags[1:]]
    legal = (flags for flags in dict.fromkeys(found) if with_flags(run, flags.split()) is not None)
    return [flags for _, flags in zip(range(3), legal)]


def _deeper(run: RunConfig) -> list[int]:
    """The next larger pipeline size that divides the number of layers."""
    layers, stages = run.megatron.transformer.num_layers, run.parallel.pipeline_model_parallel_size
    return [n for n in range(stages + 1, layers + 1) if layers % n == 0][:1]


def with_flags(run: RunConfig, flags: Sequence[str]) -> RunConfig | None:
    """The run with `flags` appended to its command line (later flags win); None if validation
    rejects it."""
    try:
        return parse_args([*run.argv, *flags], run.world_size)
    except ConfigError:
        return None
