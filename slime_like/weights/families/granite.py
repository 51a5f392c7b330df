"""Granite 3 and 4: Llama with multipliers of embeddings, of scores and of the outputs of attention
and MLP, and with logits that are divided. The MoE models have a layer's experts in one tensor, and
may have an expert that all tokens pass."""

from __future__ import annotations

import math

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.experts import EXPERT, REQUIRED, ExpertKeys, expert_settings
from slime_like.weights.families.nemotron_h import mamba_parameters
from slime_like.weights.mappings import Mapping, ReplicatedRows, RowParallel, StackedGatedMLP
from slime_like.weights.stacked_experts import DownRows, GateUpRows

LAYER = "model.layers.{layer}"
BLOCK = f"{LAYER}.block_sparse_moe"
MULTIPLIERS = frozenset(
    {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
)
SHARED_FFN = "shared_intermediate_size"
EXPERT_PARAMETERS: dict[str, Mapping] = {
    f"{MLP}.router.weight": ReplicatedRows(f"{BLOCK}.router.layer.weight", "experts"),
    f"{EXPERT}.linear_fc1.weight": GateUpRows(f"{BLOCK}.input_linear.weight"),
    f"{EXPERT}.linear_fc2.weight": DownRows(f"{BLOCK}.output_linear.weight"),
}
SHARED_PARAMETERS: dict[str, Mapping] = {
    f"{MLP}.shared_experts.linear_fc1.weight": StackedGatedMLP(
        f"{LAYER}.shared_mlp.input_linear.weight", "shared_ffn"
    ),
    f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(
        f"{LAYER}.shared_mlp.output_linear.weight", "shared_ffn"
    ),
}
EXPERTS = ExpertKeys(experts=("num_local_experts",), ffn="intermediate_size")
TINY = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7},
    **{"logits_scaling": 1.9},
}
TINY_EXPERTS = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}


def multipliers(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig, with transformers' defaults."""
    number = {key: reader.number(key, default=1.0, whole=False) for key in MULTIPLIERS}
    return {
        "embedding_multiplier": float(number["embedding_multiplier"]),
        "softmax_scale": float(number["attention_multiplier"]),
        "residual_multiplier": float(number["residual_multiplier"]),
        "logits_scaling": float(number["logits_scaling"]),
    }


def _experts(reader: ConfigReader) -> dict[str, object]:
    return {**multipliers(reader), **expert_settings(reader, EXPERTS)}


def _experts_and_shared(reader: ConfigReader) -> dict[str, object]:
    if not reader.config.get(SHARED_FFN):  # as GraniteMoeForCausalLM
        return _experts(reader)
    return {
        **_experts(reader),
        "moe_shared_expert_intermediate_size": reader.number(SHARED_FFN),
    }


register_model_family(
    ModelFamily(
        "GraniteForCausalLM",
        "granite",
        llama.PARAMETERS,
        keys=MULTIPLIERS,
        settings=multipliers,
        published=(
            *("granite-3.0-2b", "granite-3.0-8b", "granite-3.1-2b", "granite-3.1-8b"),
            *("granite-3.2", "granite-3.3"),
        ),
        tiny=TINY,
    )
)
register_model_family(
    ModelFamily(
        "GraniteMoeForCausalLM",
        "granitemoe",
        {**llama.PARAMETERS, **EXPERT_PARAMETERS},
        required=(*REQUIRED, "num_local_experts"),
        keys=EXPERTS.keys | MULTIPLIERS,
        settings=_experts,
        published=("granite-3.0-1b", "granite-3.0-3b", "granite-3.1-1b", "granite-3.1-3b"),
        tiny=TINY_EXPERTS,
    )
)
register_model_family(
    ModelFamily(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {**llama.PARAMETERS, **EXPERT_PARAMETERS, **SHARED_PARAMETERS},
        required=(*REQUIRED, "num_local_experts"),
        keys=EXPERTS.keys | MULTIPLIERS | {SHARED_FFN},
        settings=_experts_and_shared,
        tiny={**TINY_EXPERTS, SHARED_FFN: 40},
    )
)


def _granite_4(reader: ConfigReader) -> dict[str, object]:
    """Layers with Mamba-2 or attention; the dense MLP, or the expert that all tokens pass, is
    `shared_mlp`."""
    layers = reader.number("num_hidden_layers")
    kinds = reader.config.get("layer_types") or ["mamba"] * layers  # transformers' default
    if len(kinds) != layers:
        reader.refuse(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    shared = reader.number(SHARED_FFN)
    if reader.config["num_local_experts"] == 0:
        settings = {**multipliers(reader), "ffn_hidden_size": shared}
    else:
        settings = {**_experts(reader), "moe_shared_expert_intermediate_size": shared}
    if reader.config.get("position_embedding_type") != "rope":
        settings["no_rope_freq"] = [1] * layers
    linear = [int(kind in MAMBA) for kind in kinds]
    return {**settings, **_mamba(reader, linear)} if any(linear) else settings


def _mamba(reader: ConfigReader, linear: list[int]) -> dict[str, object]:
    """Sizes of Mamba-2. It has one group: the norm of its output is over all groups."""
    require_values(reader, {"mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False})
    limit = reader.config.get("time_step_limit") or UNLIMITED[0]
    if limit not in UNLIMITED:
        reader.refuse(f"time_step_limit {limit!r} is not supported; only [0.0, Infinity] is")
    heads = reader.number("mamba_n_heads", default=128)
    inner = int(reader.number("mamba_expand", default=2)) * int(reader.number("hidden_size"))
    size = reader.config.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else reader.number("mamba_d_head")
    if size * heads != inner:
        reader.refuse(
            f"mamba_n_heads {heads} of size {size} are not mamba_expand x hidden_size, {inner}"
        )
    return {
        "linear_attention_freq": linear,
        "mamba_smallest_step": 0.0,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": reader.number("mamba_d_state", default=256),
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": reader.number("mamba_d_conv", default=4),
    }


# as JSON has infinity, and as transformers 5 writes it
UNLIMITED: list[object] = [[0.0, math.inf], [0.0, {"__float__": "Infinity"}]]
MAMBA = frozenset({"mamba", "linear_attention"})
MAMBA_KEYS = frozenset(
    {
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    }
)
# of kernels, and of training
WITHOUT_EFFECT = frozenset({"mamba_chunk_size", "init_method", "normalization_function"})
register_model_family(
    ModelFamily(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **llama.PARAMETERS,
            **mamba_parameters(f"{LAYER}.mamba"),
            f"{MLP}.linear_fc1.weight": StackedGatedMLP(f"{LAYER}.shared_mlp.input_linear.weight"),
            f"{MLP}.linear_fc2.weight": RowParallel(
                f"{LAYER}.shared_mlp.output_linear.weight", "ffn"
            ),
            **EXPERT_PARAMETERS,
            **SHARED_PARAMETERS,
        },
        required=("num_key_value_heads", "num_local_experts", SHARED_FFN),
        keys=EXPERTS.keys
        | MULTIPLIERS
        | MAMBA_KEYS
        | WITHOUT_EFFECT
        | {SHARED_FFN, "position_embedding_type"},
        settings=_granite_4,
        layer_types=MAMBA | {"attention", "full_attention"},
        published=("granite-4.0",),
        tiny={
            **{**TINY, "num_local_experts": 0, SHARED_FFN: 40, "position_embedding_type": "rope"},
            **{"mamba_n_heads": 4, "mamba_d_state": 5, "mamba_d_conv": 4, "mamba_expand": 1},
            **{"layer_types": ["full_attention"], "num_experts_per_tok": 0},
        },
    )
)
