"""Rules about how the network is cut over processes: tensor-, pipeline-, context- and data-parallel
sizes, and the interleaved schedule."""

from __future__ import annotations

from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import LayoutSettings, Rule, Settings, problem
from arguments.schema import ParallelConfig
from slime_like.config import Problem, flag_name


def world_is_divisible(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.model_parallel_size
    if s.world_size % size == 0:
        return []
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = " x ".join(
        f"{flag_name(n)} {getattr(s.parallel, n)}"
        for n in names
        if n != "context_parallel_size" or s.parallel.context_parallel_size > 1
    )
    return problem(
        "tensor_model_parallel_size",
        None,
        f"{sizes} = {size} does not divide the {s.world_size} processes; change a size or the number of processes",
    )


def sequence_parallel_needs_tensor_parallel(s: Settings) -> list[Problem]:
    if s.parallel.sequence_parallel and s.parallel.tensor_model_parallel_size == 1:
        return problem(
            "sequence_parallel",
            None,
            "needs --tensor-model-parallel-size above 1; leave it out or raise that",
        )
    return []


def tensor_parallel_divides_the_network(s: LayoutSettings) -> list[Problem]:
    size = s.parallel.tensor_model_parallel_size
    found = []
    for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        whole = s.core.get(name)
        if whole and whole % size:
            found += problem(
                "tensor_model_parallel_size",
                size,
                f"does not divide {flag_name(name)} {whole}; choose a divisor of it",
            )
    return found


def context_parallel_has_limits(s: Settings) -> list[Problem]:
    """What ranks that share sequences cannot do, and which of them exchanges keys and values how."""
    size, how = s.parallel.context_parallel_size, s.core.get("cp_comm_type")
    if size == 1:
        used = how is None or (s.critic.critic_context_parallel_size or 1) > 1
        return (
            []
            if used
            else problem("cp_comm_type", how, "needs --context-parallel-size above 1; leave it out")
        )
    found = []
    for name in ("attention_dropout", "hidden_dropout"):
        if s.core.get(name):
            found += problem(
                name,
                s.core[name],
                "must be 0 with --context-parallel-size above 1, whose ranks would all drop the same positions",
            )
    local = resolve_transformer_impl(s.model, s.machine) == "local"
    if s.core.get("multi_latent_attention") and not local:
        found += problem(
            "context_parallel_size",
            size,
            "is proved for multi-latent attention with --transformer-impl local only; use that",
        )
    if local and how not in (None, "all_gather"):
        found += problem(
            "cp_comm_type",
            how,
            "needs Transformer Engine layers, which are not used here; use all_gather, or leave it out",
        )
    heads, tensor = s.core.get("num_attention_heads"), s.parallel.tensor_model_parallel_size
    groups = s.core.get("num_query_groups") or heads
    if how == "a2a" and heads and groups and (heads // tensor % size or groups // tensor % size):
        have = f"the {heads} heads and {groups} query groups, over --tensor-model-parallel-size {tensor}"
        found += problem(
            "cp_comm_type",
            how,
            f"exchanges heads, so --context-parallel-size {size} must divide {have}; use p2p or all_gather",
        )
    return found


def virtual_stages_of(parallel: ParallelConfig, num_layers: int | None) -> int | None:
    """Model chunks on each pipeline rank, by either of the two flags; None without the interleaved
    schedule."""
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    if per_chunk is None or not num_layers:
        return None
    return num_layers // parallel.pipeline_model_parallel_size // per_chunk


def interleaved_flags(s: Settings) -> list[Problem]:
    parallel = s.parallel
    stages, layers = (
        parallel.num_virtual_stages_per_pipeline_rank,
        parallel.num_layers_per_virtual_pipeline_stage,
    )
    if stages is None and layers is None:
        return []
    name = (
        "num_layers_per_virtual_pipeline_stage"
        if stages is None
        else "num_virtual_stages_per_pipeline_rank"
    )
    if parallel.pipeline_model_parallel_size == 1:
        return problem(
            name, getattr(parallel, name), "needs --pipeline-model-parallel-size above 1"
        )
    if stages == 1:
        return problem(name, 1, "must be above 1; leave it out for the plain schedule")
    return []


def pipeline_divides_the_layers(s: LayoutSettings) -> list[Problem]:
    pipeline, layers = s.parallel.pipeline_model_parallel_size, s.core.get("num_layers")
    if not layers:
        return []
    if layers % pipeline:
        return problem(
            "pipeline_model_parallel_size",
            pipeline,
            f"does not divide the {layers} layers; choose a divisor of {layers}",
        )
    per_rank = layers // pipeline
    stages, per_chunk = (
        s.parallel.num_virtual_stages_per_pipeline_rank,
        s.parallel.num_layers_per_virtual_pipeline_stage,
    )
    if stages and per_rank % stages:
        return problem(
            "num_virtual_stages_per_pipeline_rank",
            stages,
            f"does not divide the {per_rank} layers of a pipeline rank",
        )
    if per_chunk and (per_rank % per_chunk or per_rank == per_chunk):
        return problem(
            "num_layers_per_virtual_pipeline_stage",
            per_chunk,
            f"must be a proper divisor of the {per_rank} layers of a pipeline rank",
        )
    return []


def backend_is_there(s: Settings) -> list[Problem]:
    if s.parallel.distributed_backend == "nccl" and not s.machine.cuda:
        return problem(
            "distributed_backend",
            "nccl",
            "needs CUDA, which is not available here; use gloo or auto",
        )
    return []


PARALLEL_RULES: tuple[Rule, ...] = (
    world_is_divisible, sequence_parallel_needs_tensor_parallel, tensor_parallel_divides_the_network,
    context_parallel_has_limits, interleaved_flags, pipeline_divides_the_layers, backend_is_there,
)  # fmt: skip
