"""Solar Open: grouped-query attention with DeepSeek-V3's experts in every layer."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import ModelFamily, register_model_family
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    TINY,
    sigmoid_experts,
)

register_model_family(
    ModelFamily(
        "SolarOpenForCausalLM",
        "solar_open",
        {**llama.PARAMETERS, **EXPERT_PARAMETERS},
        required=("num_key_value_heads", "head_dim", *EXPERTS_REQUIRED),
        keys=EXPERT_KEYS,
        settings=sigmoid_experts,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        stand_ins={"intermediate_size": "moe_intermediate_size"},  # no layer is dense
        rope_theta=1e6,
        published=("Solar-Open",),
        tiny={
            **{**TINY, "first_k_dense_replace": None, "head_dim": 16},
            **{"n_routed_experts": 4, "num_experts_per_tok": 3},
        },
    )
)
