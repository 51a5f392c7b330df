"""Search over the parallel layouts of a number of GPUs, ranked by the estimated time of a step.

The cost model, in seconds for one optimizer step on every GPU:

    compute  = 8 N_active T / (G F)          6 N T of forward and backward (arXiv 2001.08361), and
                                             2 N T more where all layers are recomputed
    tensor   = 4 (t - 1) / t h T' L / (P B)  two all-gathers and two reduce-scatters of the rows in
               times 2                       a layer, forward and backward (arXiv 2205.05198)
    expert   = 4 k (e - 1) / e h T' L / P B  dispatch and combine, forward and backward
    data     = (gradients + weights) / B     of a rank, once per step
    step     = (compute + tensor + expert) / (1 - bubble) + data

with T tokens of the step, T' those of one rank, G GPUs of F FLOP/s, P stages, and B bytes/s: within
a node if the group fits into one, otherwise between nodes. Only the order of the layouts matters; F
and B are round numbers of one kind of machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arguments.run_config import RunConfig
from slime_like.preflight.advice import with_flags
from slime_like.preflight.batches import batches_of
from slime_like.preflight.check import check
from slime_like.preflight.communication import bubble
from slime_like.preflight.report import Preflight, gb
from slime_like.preflight.shape import ModelShape, shape_of

FLOPS = 400e12  # bf16 FLOP/s that an H100 reaches in matrix products of this size
# bytes per second of one GPU
WITHIN_NODE = 300e9
BETWEEN_NODES = 40e9
BEST = 5
MAX_CHECKED = 12  # until none has fitted, and from the first one that fits


@dataclass(frozen=True, slots=True)
class Layout:
    tensor: int
    pipeline: int
    context: int
    expert: int | None  # None: a network without experts

    @property
    def flags(self) -> list[str]:
        flags = [
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--context-parallel-size", str(self.context)),
        ]
        if self.expert is not None:
            flags += ["--expert-model-parallel-size", str(self.expert)]
            flags += ["--expert-tensor-parallel-size", "1" if self.expert > 1 else "null"]
        return [*flags, "--sequence-parallel", *([] if self.tensor > 1 else ["false"])]

    def is_within(self, other: Layout) -> bool:
        """Whether no size is larger than the other's, so that a rank holds at least as much."""
        return (
            self.tensor <= other.tensor
            and self.pipeline <= other.pipeline
            and self.context <= other.context
            and (self.expert or 1) <= (other.expert or 1)
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    seconds: float  # of an optimizer step, by the cost model
    bubble: float
    preflight: Preflight

    def as_json(self) -> dict[str, object]:
        return {
            "flags": self.layout.flags,
            "step_s": self.seconds,
            "bubble": self.bubble,
            "peak": self.preflight.heaviest.peak,
        }


def search(config: RunConfig) -> list[Candidate]:
    """The five best layouts that fit, fastest first. Legality is decided by the validation rules,
    memory by networks on the meta device, the order by the cost model."""
    ranked = []
    shape = shape_of(config.megatron.transformer, config.gpt)
    for layout in layouts(config):
        if not may_fit(config, shape, layout):
            continue
        planned = with_layout(config, layout)
        if planned is not None:
            ranked.append((step_seconds(planned, shape), layout, planned))
    ranked.sort(key=lambda item: item[0])
    fitting: list[Candidate] = []
    too_large: list[Layout] = []
    checked = 0
    for seconds, layout, planned in ranked:
        if any(layout.is_within(each) for each in too_large):
            continue
        preflight = check(planned)
        checked += 1
        if preflight.fits:
            if not fitting:
                checked = 1
            fitting.append(Candidate(layout, seconds, preflight.bubble, preflight))
        else:
            too_large.append(layout)
        if len(fitting) == BEST or (fitting and checked == MAX_CHECKED):
            break
        if not fitting and checked == MAX_CHECKED and not _smallest_fit(ranked, too_large):
            break
    return fitting


def _smallest_fit(
    ranked: Sequence[tuple[float, Layout, RunConfig]], too_large: Sequence[Layout]
) -> bool:
    """Whether a layout fits of those that divide the model the most: if none does, none fits, and
    building all of a large model would take long."""
    candidates = [layout for _, layout, _ in ranked]
    for _, layout, planned in ranked:
        if any(layout != each and layout.is_within(each) for each in candidates):
            continue
        if layout not in too_large and check(planned).fits:
            return True
    return False


def layouts(config: RunConfig) -> Iterator[Layout]:
    """Candidate layouts: tensor parallelism within a node, and every pipeline size that divides the
    number of layers."""
    transformer = config.megatron.transformer
    world = config.world_size
    experts = transformer.num_moe_experts
    for tensor in _powers(config.preflight.preflight_gpus_per_node):
        for pipeline in (n for n in range(1, 17) if transformer.num_layers % n == 0):
            for context in _powers(8):
                if world % (tensor * pipeline * context):
                    continue
                for expert in _powers(experts) if experts else [None]:
                    if expert is None or world % (expert * pipeline) == 0:
                        yield Layout(tensor, pipeline, context, expert)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


def may_fit(config: RunConfig, shape: ModelShape, layout: Layout) -> bool:
    """Rough estimate from weights, gradients and optimizer shards only."""
    expert = shape.expert_parameters / (layout.pipeline * (layout.expert or 1))
    other = shape.other_parameters / (layout.pipeline * layout.tensor)
    size = config.megatron.transformer.params_dtype.itemsize
    held = (expert + other) * (size + 4) + 12 * shape.total / config.world_size
    return held < 0.9 * config.preflight.preflight_memory_gb * 1e9


def with_layout(config: RunConfig, layout: Layout) -> RunConfig | None:
    """The run with the flags of another layout; None if validation rejects it."""
    return with_flags(config, layout.flags)


def step_seconds(config: RunConfig, shape: ModelShape) -> float:
    """Estimated time of a step; see the module docstring."""
    batches = batches_of(config)
    transformer = config.megatron.transformer
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    tokens = batches.samples * batches.mean
    full = transformer.recompute_granularity == "full"
    compute = (8 if full else 6) * shape.active * tokens / (config.world_size * FLOPS)
    compute *= batches.imbalance / (batches.used or 1)
    size = transformer.params_dtype.itemsize
    # tokens of one data- and context-parallel rank, through the layers of a stage
    rows = batches.number * batches.tokens / parallel.context_parallel_size
    moved = rows * transformer.hidden_size * size * transformer.num_layers / stages
    sent = 8 * (tensor - 1) / tensor * moved / WITHIN_NODE
    experts = parallel.expert_model_parallel_size
    if experts > 1:
        near = experts <= config.preflight.preflight_gpus_per_node
        share = sum(shape.experts) / len(shape.experts) / tensor
        speed = WITHIN_NODE if near else BETWEEN_NODES
        sent += 4 * shape.topk * (experts - 1) / experts * share * moved / speed
    sent += _around_the_ring(config, moved / tensor)
    of_rank = shape.expert_parameters / (stages * experts)
    of_rank += shape.other_parameters / (stages * tensor)
    data = of_rank * (4 + size) / BETWEEN_NODES
    return (compute + sent) / (1 - bubble(config, batches)) + data


def _around_the_ring(config: RunConfig, moved: float) -> float:
    """Time for a rank's keys and values to pass all others: once forward, and once backward with
    their gradients."""
    ranks = config.parallel.context_parallel_size
    transformer = config.megatron.transformer
    groups = transformer.num_query_groups or transformer.num_attention_heads
    share = 2 * groups * transformer.kv_channels / transformer.hidden_size
    return 3 * (ranks - 1) * share * moved / WITHIN_NODE


def text_of_search(best: Sequence[Candidate]) -> str:
    if not best:
        return "search: no layout fits; use more GPUs, or flags that need less memory"
    lines = ["layouts that fit, fastest first by the cost model:"]
    for place, each in enumerate(best, start=1):
        lines.append(
            f"  {place}. {shlex.join(each.layout.flags)}  ({each.seconds:.2f} s per step, bubble "
            f"{each.bubble:.1%}, peak {gb(each.preflight.heaviest.peak)})"
        )
    return "\n".join(lines)
