"""MiniMax-M2: sigmoid routing with an expert bias and no shared expert, norms over all heads of
queries or keys at once, partial rotary embedding."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.experts import (
    REQUIRED,
    ExpertKeys,
    expert_parameters,
    expert_settings,
)
from slime_like.weights.mappings import Mapping, Replicated

BLOCK = "model.layers.{layer}.block_sparse_moe"
PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.q_layernorm.weight": Replicated(f"{HF_ATTENTION}.q_norm.weight", "query"),
    f"{ATTENTION}.k_layernorm.weight": Replicated(f"{HF_ATTENTION}.k_norm.weight", "key_value"),
    **expert_parameters(BLOCK, "w1", "w3", "w2"),
    f"{MLP}.router.expert_bias": Replicated(f"{BLOCK}.e_score_correction_bias", "experts"),
}
EXPERTS = ExpertKeys(experts=("num_local_experts",), ffn="intermediate_size")
# Key -> the only supported value, which every published file has.
FIXED: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
# Settings of linear attention, dense layers and shared experts, which M2 does not have.
WITHOUT_EFFECT = {"mlp_intermediate_size", "shared_moe_mode", "attn_type_list"}
MTP = {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}


def _settings(reader: ConfigReader) -> dict[str, object]:
    require_values(reader, FIXED)
    if set(reader.config.get("attn_type_list") or [1]) != {1}:
        reader.refuse(
            "attn_type_list: linear attention (0) is not supported; every layer must be 1"
        )
    return {
        **expert_settings(reader, EXPERTS),
        "moe_router_pre_softmax": True,  # there is no softmax
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "qk_layernorm": True,
        "qk_norm_of_all_heads": True,
    }


def _rotary_percent(reader: ConfigReader) -> float:
    share: float = reader.number("rotary_dim") / reader.number("head_dim")
    return share


def _untrained_layers(reader: ConfigReader) -> int:
    return int(reader.config.get("num_mtp_modules") or 0) if reader.config.get("use_mtp") else 0


register_model_family(
    ModelFamily(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        PARAMETERS,
        required=(*REQUIRED, "num_local_experts", "head_dim"),
        keys=EXPERTS.keys | FIXED.keys() | WITHOUT_EFFECT | MTP | {"rotary_dim"},
        rotary_percent=_rotary_percent,
        rope_theta=5e6,
        settings=_settings,
        defaults={"max_position_embeddings": 196608},
        other_model_types=("minimax",),
        untrained_layers=_untrained_layers,
        published=("MiniMax-M2",),
        tiny={"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3},
    )
)
