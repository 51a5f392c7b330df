"""DeepSeek-V3, and what is built alike: Kimi-K2, Moonlight, GLM-4.7-Flash. Multi-latent attention,
experts chosen by sigmoids within groups.

What megatron-core 0.16 has no counterpart for is refused by key: other
group scores than the sum of each group's two best, weights that are not renormalised, rotary
embeddings that are not interleaved. Layers of multi-token prediction are neither read nor trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    HF_MLP,
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
)
from slime_like.weights.families.experts import WITHOUT_EFFECT, expert_parameters
from slime_like.weights.mappings import ColumnParallel, GatedMLP, Mapping, Replicated, RowParallel

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ROUTER_KEYS = (
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "moe_layer_freq",
)
KEYS = frozenset(
    {
        *(*MLA_KEYS, *ROUTER_KEYS, *WITHOUT_EFFECT),
        *(
            "n_routed_experts",
            "num_local_experts",
            "n_shared_experts",
            "moe_intermediate_size",
            "num_experts_per_tok",
            "first_k_dense_replace",
            "mlp_layer_types",
        ),
        *(
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "rope_interleave",
            "qk_head_dim",
            "ep_size",
            "seq_aux",
            "aux_loss_alpha",
        ),
    }
)
REQUIRED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
)
FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}  # key -> transformers' default


def deepseek_settings(reader: ConfigReader) -> dict[str, Any]:
    """MLATransformerConfig's fields. What is unsupported is told to the reader."""
    for key, legal in FIXED.items():
        value = reader.config.get(key)
        if value is not None and value != legal:
            reader.refuse(f"{key} {value!r} is not supported; the only legal value is {legal!r}")
    heads, groups = (
        reader.number("num_attention_heads"),
        reader.number("num_key_value_heads", default=reader.number("num_attention_heads")),
    )
    if groups != heads:
        reader.refuse(
            f"num_key_value_heads {groups} must be num_attention_heads {heads}: latent attention has no groups"
        )
    rope_dim = reader.number("qk_rope_head_dim")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": reader.number("q_lora_rank")
        if reader.config.get("q_lora_rank") is not None
        else None,
        "kv_lora_rank": reader.number("kv_lora_rank"),
        "qk_head_dim": reader.number("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": rope_dim,
        "v_head_dim": reader.number("v_head_dim"),
        "kv_channels": rope_dim,  # what the file calls head_dim
        "qk_layernorm": True,  # of the latents
        **_rotary(reader),
        **_experts(reader),
    }


def _rotary(reader: ConfigReader) -> dict[str, Any]:
    config = reader.config
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    base = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    settings: dict[str, Any] = {
        "rope_type": "rope",
        "rotary_base": float(base),
        "rotary_percent": 1.0,
    }
    if kind != "yarn":
        if kind != "default":
            reader.refuse(
                f"rope_type {kind!r} is not supported with latent attention; legal values: default, yarn"
            )
        return settings | {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    yarn = {key: given.pop(key, default) for key, default in YARN.items()}
    for key in ("factor", "original_max_position_embeddings"):
        if not isinstance(given.get(key), int | float):
            reader.refuse(f"rope_type 'yarn' needs {key}, a number, not {given.get(key)!r}")
    settings |= {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given.pop("factor", None) or 1),
    }
    settings["original_max_position_embeddings"] = int(
        given.pop("original_max_position_embeddings", None) or 1
    )
    if not yarn["mscale"] or not yarn["mscale_all_dim"]:
        reader.refuse("rope_type 'yarn' without mscale and mscale_all_dim is not supported")
    for key, value in sorted(given.items()):
        reader.refuse(f"rope_type 'yarn' with {key} {value!r} is not supported")
    return settings | {key: float(value) for key, value in yarn.items()}


def _experts(reader: ConfigReader) -> dict[str, Any]:
    experts, topk = reader.number("n_routed_experts"), reader.number("num_experts_per_tok")
    groups, chosen = reader.number("n_group", default=1), reader.number("topk_group", default=1)
    limited = chosen < groups
    if limited and (experts % groups or topk % chosen or topk // chosen != 2):
        reader.refuse(
            f"n_group {groups} and topk_group {chosen} with num_experts_per_tok {topk}: megatron-core scores a group by its best "
            "num_experts_per_tok / topk_group experts, the file's architecture by its best two"
        )
    if topk == 1:
        reader.refuse(
            "num_experts_per_tok 1 is not supported: megatron-core does not renormalise a single weight"
        )
    layers, dense = reader.number("num_hidden_layers"), _dense_layers(reader)
    if dense >= layers:
        reader.refuse(f"first_k_dense_replace {dense} leaves no layer with experts")
    ffn, shared = (
        reader.number("moe_intermediate_size"),
        int(reader.config.get("n_shared_experts") or 0),
    )
    if not shared:
        reader.refuse("n_shared_experts 0 is not supported with this architecture")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        # megatron-core's condition on group-limited routing; a sigmoid has no softmax
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_router_topk_scaling_factor": float(
            reader.number("routed_scaling_factor", default=1.0, whole=False)
        ),
        "moe_shared_expert_intermediate_size": shared * ffn,
        "moe_router_load_balancing_type": "none",
    }


def _dense_layers(reader: ConfigReader) -> int:
    """The first layers, which have no experts, by either of the keys."""
    kinds = reader.config.get("mlp_layer_types")
    if kinds is None:
        return int(reader.config.get("first_k_dense_replace") or 0)
    dense = [kind == "dense" for kind in kinds]
    if dense != sorted(dense, reverse=True) or len(dense) != reader.number("num_hidden_layers"):
        reader.refuse(f"mlp_layer_types {kinds!r:.200}: dense layers must be the first ones")
    return sum(dense)


def _untrained_layers(reader: ConfigReader) -> int:
    """Of multi-token prediction: they stand after the model's own."""
    return int(reader.config.get("num_nextn_predict_layers") or 0)


# megatron-core turns the rotated part of queries and keys from pairs into halves itself, as the
# file's architecture does
PARAMETERS: dict[str, Mapping] = {
    **{
        name: mapping
        for name, mapping in llama.PARAMETERS.items()
        if ".self_attention." not in name
    },
    f"{ATTENTION}.linear_q_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_proj.weight", "latent_query"
    ),
    f"{ATTENTION}.linear_q_down_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_a_proj.weight", "q_latent"
    ),
    f"{ATTENTION}.q_layernorm.weight": Replicated(
        f"{HF_ATTENTION}.q_a_layernorm.weight", "q_latent"
    ),
    f"{ATTENTION}.linear_q_up_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_b_proj.weight", "latent_query", "q_latent"
    ),
    f"{ATTENTION}.linear_kv_down_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.kv_a_proj_with_mqa.weight", "kv_latent_and_rotary"
    ),
    f"{ATTENTION}.kv_layernorm.weight": Replicated(
        f"{HF_ATTENTION}.kv_a_layernorm.weight", "kv_latent"
    ),
    f"{ATTENTION}.linear_kv_up_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.kv_b_proj.weight", "latent_key_value", "kv_latent"
    ),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{HF_ATTENTION}.o_proj.weight", "latent_value"),
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
    f"{MLP}.router.expert_bias": Replicated(f"{HF_MLP}.gate.e_score_correction_bias", "experts"),
    f"{MLP}.shared_experts.linear_fc1.weight": GatedMLP(
        f"{HF_MLP}.shared_experts.gate_proj.weight",
        f"{HF_MLP}.shared_experts.up_proj.weight",
        "shared_ffn",
    ),
    f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(
        f"{HF_MLP}.shared_experts.down_proj.weight", "shared_ffn"
    ),
}

DEEPSEEK_V3 = ModelFamily(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    PARAMETERS,
    required=REQUIRED,
    keys=KEYS,
    settings=deepseek_settings,
    other_model_types=("kimi_k2",),
    untrained_layers=_untrained_layers,
)
register_model_family(DEEPSEEK_V3)
register_model_family(
    dataclasses.replace(
        DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        other_model_types=(),
    )
)
