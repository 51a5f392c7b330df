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

from arguments.flags import (
    Flag,
    Shape,
    SourceField,
    read_source_fields,
    shape_of,
    spellings_of,
)
from arguments.hf.moe import layer_pattern
from arguments.megatron_help import HELP_TEXTS
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
# Supported fields. All other fields, of any release, are known flags that are rejected.
SUPPORTED = frozenset(
    [
        "num_layers",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "kv_channels",
        "hidden_dropout",
        "attention_dropout",
        "fp32_residual_connection",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "add_bias_linear",
        "add_qkv_bias",
        "normalization",
        "qk_layernorm",
        "rotary_interleaved",
        "init_method_std",
        "embedding_init_method_std",
        "attention_softmax_in_fp32",
        "apply_query_key_layer_scaling",
        "disable_bf16_reduced_precision_matmul",
        "attention_backend",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
        "perform_initialization",
        "use_cpu_initialization",
        "bf16",
        "deterministic_mode",
        "gradient_accumulation_fusion",
        "overlap_p2p_comm",
        "clone_scatter_output_in_embedding",
        "cp_comm_type",
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_token_dispatcher_type",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_token_drop_policy",
        "moe_enable_deepep",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
        "lr",
        "min_lr",
        "decoupled_lr",
        "decoupled_min_lr",
        "weight_decay",
        "apply_wd_to_qk_layernorm",
        "optimizer",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "decoupled_weight_decay",
        "sgd_momentum",
        "clip_grad",
        "muon_momentum",
        "muon_split_qkv",
        "muon_use_nesterov",
        "muon_nesterov",
        "muon_scale_mode",
        "muon_fp32_matmul_prec",
        "muon_coefficient_type",
        "muon_num_ns_steps",
        "muon_tp_mode",
        "muon_extra_scale_factor",
        "use_precision_aware_optimizer",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "main_grads_dtype",
        "main_params_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_distributed_optimizer",
        "overlap_param_gather",
        "overlap_grad_reduce",
        "grad_reduce_in_fp32",
        "align_param_gather",
        "bucket_size",
        "pad_buckets_for_high_nccl_busbw",
        "average_in_collective",
    ]
)
# Supported fields that some supported releases lack.
RELEASE_DEPENDENT = frozenset({"muon_use_nesterov", "muon_nesterov", "muon_coefficient_type"})
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
# Megatron-LM's spellings where they are not the field's name: dest -> (on, off)
SPELLINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "apply_rope_fusion": ((), ("--no-rope-fusion",)),
    "bias_activation_fusion": ((), ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion")),
    "grad_reduce_in_fp32": (("--accumulate-allreduce-grads-in-fp32",), ()),
    "bucket_size": (("--ddp-bucket-size",), ()),
    "average_in_collective": (("--ddp-average-in-collective",), ()),
    "num_moe_experts": (("--num-experts",), ()),
    "overlap_p2p_comm": (("--overlap-p2p-communication",), ("--no-overlap-p2p-communication",)),
    "num_layers_in_first_pipeline_stage": (("--decoder-first-pipeline-num-layers",), ()),
    "num_layers_in_last_pipeline_stage": (("--decoder-last-pipeline-num-layers",), ()),
    "muon_split_qkv": ((), ("--muon-no-split-qkv",)),
    "muon_nesterov": (("--muon-use-nesterov",), ("--no-muon-use-nesterov",)),
}
# Supported values; a release may have more.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_dtype": ("fp32", "fp64"),
    "moe_token_drop_policy": ("probs", "position"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "optimizer": ("adam", "sgd", "muon"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
    "muon_coefficient_type": ("simple", "quintic", "polar_express", "aol"),
    "muon_tp_mode": ("duplicated", "distributed", "blockwise"),
    "recompute_modules": ("core_attn", "mlp", "layernorm", "moe", "shared_experts"),
    "cp_comm_type": ("p2p", "all_gather", "a2a"),
    "moe_token_dispatcher_type": ("alltoall", "allgather", "flex"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
}
# torch.dtype fields -> Megatron-LM's names of the dtypes that Transformer Engine's Adam supports;
# `arguments/rules/training.py` has further restrictions.
OPTIMIZER_DTYPES: Mapping[str, tuple[str, ...]] = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
# Fields with several types -> the shape they are parsed as. A list with one item becomes the plain
# value; see `network_of_flags`.
UNIONS: Mapping[str, Shape] = {
    "moe_layer_freq": Shape("value", str),
    "pipeline_model_parallel_layout": Shape("value", str),
    "moe_router_load_balancing_type": Shape("list", str),
    "moe_aux_loss_coeff": Shape("list", float),
    **{name: Shape("value", str, words) for name, words in OPTIMIZER_DTYPES.items()},
}
# As in `slime_like.config.arg`
NEEDS: Mapping[str, tuple[str, ...]] = {
    "overlap_cpu_optimizer_d2h_h2d": ("optimizer_cpu_offload",),
    "optimizer_offload_fraction": ("optimizer_cpu_offload",),
    "pin_cpu_grads": ("optimizer_cpu_offload",),
    "pin_cpu_params": ("optimizer_cpu_offload",),
    "overlap_param_gather": ("use_distributed_optimizer", "overlap_grad_reduce"),
    **{name: ("optimizer=muon",) for name in SUPPORTED if name.startswith("muon_")},
}
DEFAULT_TEXTS = {
    "num_layers": "from --hf-checkpoint",
    "hidden_size": "from --hf-checkpoint",
    "num_attention_heads": "from --hf-checkpoint",
    "num_query_groups": "from --hf-checkpoint, else --num-attention-heads",
    "ffn_hidden_size": "from --hf-checkpoint, else 4 * --hidden-size",
    "kv_channels": "from --hf-checkpoint, else --hidden-size / --num-attention-heads",
    "hidden_dropout": "0.0",
    "attention_dropout": "0.0",
    "layernorm_epsilon": "from --hf-checkpoint, else 1e-05",
    "normalization": "from --hf-checkpoint, else LayerNorm",
    "qk_layernorm": "from --hf-checkpoint, else off",
    "add_qkv_bias": "from --hf-checkpoint, else off",
    "add_bias_linear": "from --hf-checkpoint, else on",
    "num_moe_experts": "from --hf-checkpoint, else none",
    "moe_ffn_hidden_size": "from --hf-checkpoint, else --ffn-hidden-size",
    "moe_layer_freq": "from --hf-checkpoint, else 1",
    "moe_router_topk": "from --hf-checkpoint, else 2",
    "moe_router_pre_softmax": "from --hf-checkpoint, else off",
    "moe_router_score_function": "from --hf-checkpoint, else softmax",
    "moe_shared_expert_intermediate_size": "from --hf-checkpoint, else none",
    "moe_shared_expert_gate": "from --hf-checkpoint, else off",
    "moe_token_dispatcher_type": "alltoall",
    **dict.fromkeys(OPTIMIZER_DTYPES, "fp32"),
    "optimizer_offload_fraction": "1.0",
    "lr": "none; required",
    "muon_tp_mode": "duplicated",
    "min_lr": "0.0",
    "grad_reduce_in_fp32": "on with --bf16, else off",
    "bias_activation_fusion": "on with CUDA and Transformer Engine",
    "bias_dropout_fusion": "on with CUDA and Transformer Engine",
    "masked_softmax_fusion": "on with CUDA and Transformer Engine",
    "apply_rope_fusion": "on with CUDA and Transformer Engine",
    "gradient_accumulation_fusion": "on with CUDA and Apex's extension",
    "overlap_p2p_comm": "on with NCCL and the interleaved schedule",
    "cp_comm_type": "p2p with Transformer Engine, else all_gather",
}
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
        shape = UNIONS.get(name) or shape_of(source.annotation)
        no_flag = "Callable" in str(source.annotation) or name.endswith("dtype")
        if name not in DERIVED and (shape is not None or not no_flag):
            flags.append(_flag(name, group, source, shape))
    return flags


def _flag(name: str, group: str, source: SourceField, shape: Shape | None) -> Flag:
    supported = name in SUPPORTED
    assert not supported or shape is not None or name in CHOICES, (
        f"{name} is supported and has no type"
    )
    shape = shape or Shape("value")
    is_switch = shape.kind == "switch"
    on, off = spellings_of(name, shape.kind)
    more_on, more_off = SPELLINGS.get(name, ((), ()))
    if is_switch and source.default is True:
        more_off = (*source.arg_names, *more_off)
    else:
        more_on = (*source.arg_names, *more_on)
    return Flag(
        dest=name,
        group=group,
        kind=shape.kind,
        item=shape.item,
        help=f"{HELP_TEXTS[name]} ({name} of {CONFIGS_OF_GROUP[group]})" if supported else "",
        on=tuple(dict.fromkeys((*more_on, *on))),
        off=tuple(dict.fromkeys((*more_off, *off))),
        default=source.default,
        default_text=DEFAULT_TEXTS.get(name, "auto" if name == "attention_backend" else ""),
        choices=CHOICES.get(name) or shape.choices,
        needs=NEEDS.get(name, ()),
        rejection="" if supported else _reason(name),
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
    network = {name: given[name] for name in SUPPORTED if given.get(name) is not None}
    for name in UNIONS.keys() & network.keys():
        value = network[name]
        if isinstance(value, list) and len(value) == 1:
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
                add(flag_name(name), explicit[name], ", which has none")
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
