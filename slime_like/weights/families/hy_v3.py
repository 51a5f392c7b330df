"""Hunyuan 3: Qwen3's attention, sigmoid routing with a bias, shared experts, dense first layers."""

from __future__ import annotations

from slime_like.weights.families import qwen3
from slime_like.weights.families.base import (
    HF_MLP,
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.experts import expert_parameters, shared_expert_parameters
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERTS_REQUIRED,
    sigmoid_experts,
)
from slime_like.weights.mappings import Mapping, Replicated, ReplicatedRows

PARAMETERS: dict[str, Mapping] = {
    **qwen3.PARAMETERS,
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
    f"{MLP}.router.weight": ReplicatedRows(f"{HF_MLP}.router.gate.weight", "experts"),
    f"{MLP}.router.expert_bias": Replicated(f"{HF_MLP}.expert_bias", "experts"),
    **shared_expert_parameters(f"{HF_MLP}.shared_mlp"),
}
# this family's name -> DeepSeek-V3's
NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor",
}
# how transformers computes, which is what we compute
FIXED = {"enable_moe_fp32_combine": True, "moe_router_use_sigmoid": True, "route_norm": True}


def _settings(reader: ConfigReader) -> dict[str, object]:
    require_values(reader, FIXED)
    return sigmoid_experts(reader)


register_model_family(
    ModelFamily(
        "HYV3ForCausalLM",
        "hy_v3",
        PARAMETERS,
        required=("num_key_value_heads", "head_dim", *EXPERTS_REQUIRED),
        keys=EXPERT_KEYS | FIXED.keys() | set(NAMES.values()) | {"enable_attention_fp32_softmax"},
        qk_norm=True,
        settings=_settings,
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
            **{"routed_scaling_factor": 2.826, "first_k_dense_replace": 1},
        },
        stand_ins=NAMES,
        rope_theta=11158840.0,
        published=("Hy3", "Hunyuan-3"),
        tiny={
            **{"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4},
            **{"num_experts_per_tok": 3, "num_shared_experts": 1, "router_scaling_factor": 1.7},
        },
    )
)
