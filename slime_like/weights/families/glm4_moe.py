"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts, grouped-query attention, rotary embedding of half of
each head. QKV biases and QK norms are optional."""

from __future__ import annotations

from slime_like.weights.families import qwen2, qwen3
from slime_like.weights.families.base import (
    ConfigReader,
    ModelFamily,
    half_rotary,
    register_model_family,
)
from slime_like.weights.families.prediction import DEEPSEEK_PREDICTION
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    TINY,
    sigmoid_experts,
    untrained_layers,
)

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "first_k_dense_replace": 1}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {
        "add_qkv_bias": bool(reader.config.get("attention_bias")),
        "qk_layernorm": bool(reader.config.get("use_qk_norm")),
        **sigmoid_experts(reader),
    }


register_model_family(
    ModelFamily(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**qwen2.PARAMETERS, **qwen3.PARAMETERS, **EXPERT_PARAMETERS},
        required=("num_key_value_heads", "head_dim", *EXPERTS_REQUIRED),
        keys=EXPERT_KEYS | {"attention_bias", "use_qk_norm"},
        rotary_percent=half_rotary,
        settings=_settings,
        defaults=DEFAULTS,
        untrained_layers=untrained_layers,
        prediction=DEEPSEEK_PREDICTION,
        published=("GLM-4.5", "GLM-4.6", "GLM-4.7"),
        tiny={
            **TINY,
            **{"n_routed_experts": 4, "num_experts_per_tok": 3, "head_dim": 16},
            **{"attention_bias": True, "use_qk_norm": True},
        },
    )
)
