"""megatron-core's settings as flags, and merging them with a checkpoint's config.json.

Flags are read from megatron-core's source text, because importing it takes longer than checking a
command line. `megatron_configs.py` builds its config objects.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from arguments.flags import Flag, Shape, SourceField, read_source_fields, shape_of, spellings_of
from arguments.hf.moe import layer_pattern
from arguments.megatron_fields import FIELDS, MegatronField
from arguments.schema import GPTModelConfig
from slime_like.config import Problem, flag_name

# group -> (file in megatron/core, class) in which its fields are defined
SOURCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "network (megatron-core)": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "optimizer (megatron-core)": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "data parallelism (megatron-core)": (
        ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
}
CONFIGS_OF_GROUP = {group: sources[0][1] for group, sources in SOURCES.items()}
# Set by the trainer or derived from other flags; they have no flag.
DERIVED = frozenset(
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "transformer_impl",
        "calculate_per_token_loss",
        "variable_seq_lengths",
        "deallocate_pipeline_outputs",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "gated_linear_unit",
        "barrier_with_L1_time",
        "config_logger_dir",
        "mtp_standalone",
        "mtp_num_layers",
        "mtp_loss_scaling_factor",
        "test_mode",
        "moe_extended_tp",
        "async_tensor_model_parallel_allreduce",
        "_cpu_offloading_context",
        "check_for_nan_in_grad",
    ]
)
# Why a field is not supported: the first pattern that matches its name.
REASONS: Mapping[str, str] = {
    "^fp16$|loss_scale|hysteresis": "float16 and loss scaling; use --bf16",
    "fp8|fp4|in_bf16|last_layers_bf16|tp_only_amax|quant_recipe|kitchen": "fp8 and fp4 training",
    "moe|expert|delay_wgrad|ep_overlap": "this setting of mixtures of experts",
    "latent_attention|attention_variant|dsa_|linear_|qk_clip|qk_l2|attention_output_gate"
    "|max_attention_logit|softmax_type|softmax_scale|window|no_rope|mrope": "this attention",
    "context_parallel|cp_comm|dp_cp_rank": "context parallelism",
    "cuda_graph": "CUDA graphs",
    "offload|pin_cpu|overlap_cpu": "offloading to the CPU",
    "mamba|hybrid_model|heter": "networks other than plain transformers",
    "inference|flash_decode|prefill|batch_invariant|symmetric_ar": "megatron-core's inference",
    "fsdp|nccl_ub|sharding_strategy|symmetric_registration|communication_unit|fp32_weights"
    "|meta_device|div_fusion": "Megatron-FSDP",
    "tp_comm|te_": "Transformer Engine's own communication and layers",
    "pipeline|p2p": "this pipeline setting",
    "precision_aware|param_remainders|muon|instances": "this optimizer",
}
ACTIVATION_FLAGS = {
    "swiglu": ("silu", True),
    "squared_relu": ("squared_relu", False),
    "quick_geglu": ("quick_gelu", True),
}
# Dropout is not part of the checkpoint's network: the flag (default 0) overrides config.json.
NOT_COMPARED = ("hidden_dropout", "attention_dropout")

# Parts of an MoE layer that a checkpoint only has if its config.json says so.
NONE_BY_DEFAULT = frozenset(
    {
        "num_moe_experts",
        "moe_shared_expert_intermediate_size",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
    }
)


@cache
def megatron_fields() -> dict[str, tuple[tuple[str, SourceField], ...]]:
    """Field name -> (group, field) in every configuration that has it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations, "megatron-core is a dependency"
    root = Path(spec.submodule_search_locations[0])
    fields: dict[str, tuple[tuple[str, SourceField], ...]] = {}
    for group, sources in SOURCES.items():
        for file, class_name in sources:
            for source in read_source_fields(root / file, class_name):
                places = fields.get(source.name, ())
                if group not in dict(places):
                    fields[source.name] = (*places, (group, source))
    return fields


def megatron_flags() -> list[Flag]:
    """One flag per field name, even if several configurations have it."""
    flags = []
    for name, places in megatron_fields().items():
        group, source = places[0]
        shape = _union(name) or shape_of(source.annotation)
        no_flag = "Callable" in str(source.annotation) or name.endswith("dtype")
        if name not in DERIVED and (shape is not None or not no_flag):
            flags.append(_flag(name, group, source, shape))
    return flags


def _union(name: str) -> Shape | None:
    return FIELDS[name].union if name in FIELDS else None


def _flag(name: str, group: str, source: SourceField, shape: Shape | None) -> Flag:
    row = FIELDS.get(name, MegatronField(""))
    assert row.help == "" or shape is not None or row.choices, f"{name} has no type"
    shape = shape or Shape("value")
    on, off = spellings_of(name, shape.kind)
    more_on, more_off = row.on, row.off
    if shape.kind == "switch" and source.default is True:
        more_off = (*source.arg_names, *more_off)
    else:
        more_on = (*source.arg_names, *more_on)
    return Flag(
        dest=name,
        group=group,
        kind=shape.kind,
        item=shape.item,
        help=f"{row.help} ({name} of {CONFIGS_OF_GROUP[group]})" if row.help else "",
        on=tuple(dict.fromkeys((*more_on, *on))),
        off=tuple(dict.fromkeys((*more_off, *off))),
        default=source.default,
        default_text=row.default,
        choices=row.choices or shape.choices,
        legal=row.legal,
        needs=row.needs,
        only_with=row.only_with,
        excludes=row.excludes,
        required_with=row.required_with,
        idle_without=row.idle_without,
        relations=row.relations,
        rejection="" if name in FIELDS else _reason(name),
    )


def _reason(name: str) -> str:
    """Why a field is not supported."""
    for pattern, reason in REASONS.items():
        if re.search(pattern, name):
            return reason
    return "this setting of megatron-core"


def network_of_flags(
    given: Mapping[str, object],
) -> tuple[dict[str, object], list[Problem]]:
    """TransformerConfig fields given on the command line, with Megatron-LM's spellings translated.

    `activation_func` is a name, as in `HfModel.transformer`.
    """
    network = {name: given[name] for name in FIELDS if given.get(name) is not None}
    for name, value in network.items():
        if FIELDS[name].union is not None and isinstance(value, list) and len(value) == 1:
            network[name] = value[0]
    problems: list[Problem] = []
    if "moe_layer_freq" in network:
        try:
            network["moe_layer_freq"] = layer_pattern(str(network["moe_layer_freq"]))
        except ValueError as error:
            problems.append(Problem("--moe-layer-freq", network.pop("moe_layer_freq"), str(error)))
    chosen = [name for name in ACTIVATION_FLAGS if given.get(name)]
    for name in chosen[1:]:
        message = f"conflicts with {flag_name(chosen[0])}; set only one of them"
        problems.append(Problem(flag_name(name), None, message))
    if chosen:
        network["activation_func"], network["gated_linear_unit"] = ACTIVATION_FLAGS[chosen[0]]
    return network, problems


def disagreements(
    explicit: Mapping[str, object], checkpoint: Mapping[str, object], given: Mapping[str, object]
) -> list[Problem]:
    """Problems: flags that conflict with --hf-checkpoint's config.json."""
    problems = []

    def add(flag: str, value: object, message: str) -> None:
        problems.append(Problem(flag, value, f"conflicts with --hf-checkpoint{message}; remove it"))

    different = [
        name
        for name, value in explicit.items()
        if name in checkpoint and name not in NOT_COMPARED and value != checkpoint[name]
    ]
    if "activation_func" in different or "gated_linear_unit" in different:
        flag = next((flag_name(name) for name in ACTIVATION_FLAGS if given.get(name)), "--swiglu")
        gated = "gated " if checkpoint.get("gated_linear_unit") else ""
        add(flag, None, f"'s {gated}{checkpoint.get('activation_func')}")
    for name in different:
        if name not in ("activation_func", "gated_linear_unit"):
            add(flag_name(name), explicit[name], f"'s {checkpoint[name]}")
    if "num_layers" in checkpoint:
        for name in sorted(NONE_BY_DEFAULT & explicit.keys() - checkpoint.keys()):
            if explicit[name]:
                value = explicit[name]
                add(flag_name(name), None if value is True else value, ", which has none")
    heads = checkpoint.get("num_attention_heads")
    single_groups = heads is not None and checkpoint.get("num_query_groups") == heads
    if given.get("group_query_attention") and single_groups:
        add("--group-query-attention", None, f", which has {heads} heads and as many groups")
    return problems


def merge_network(
    explicit: Mapping[str, object], checkpoint: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    """TransformerConfig's fields from the checkpoint and the flags. Dropout is off unless a flag
    says otherwise."""
    network = {**checkpoint, **dict.fromkeys(NOT_COMPARED, 0.0), **explicit}
    if given.get("group_query_attention"):
        network.setdefault("num_query_groups", 1)
    return network


def required_without_checkpoint(
    network: Mapping[str, object], gpt: GPTModelConfig
) -> Iterable[str]:
    """Flags that describe the network and are missing when no --hf-checkpoint does."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if network.get(name) is None:
            yield flag_name(name)
    needed = ["vocab_size", "position_embedding_type"]
    if gpt.position_embedding_type == "learned_absolute":
        needed.append("max_position_embeddings")
    for name in needed:
        if getattr(gpt, name) in (None, "yarn"):
            yield flag_name(name)
