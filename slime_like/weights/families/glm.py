"""GLM-4-9B of 2024 (glm-4-9b-hf): interleaved rotary embedding of half of each head."""

from __future__ import annotations

from slime_like.weights.families import qwen2
from slime_like.weights.families.base import (
    HF_MLP,
    MLP,
    ConfigReader,
    ModelFamily,
    half_rotary,
    register_model_family,
)
from slime_like.weights.mappings import Mapping, StackedGatedMLP

PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    f"{MLP}.linear_fc1.weight": StackedGatedMLP(f"{HF_MLP}.gate_up_proj.weight"),
}


def glm_settings(reader: ConfigReader) -> dict[str, object]:
    return {
        "add_qkv_bias": bool(reader.config.get("attention_bias", True)),
        "rotary_interleaved": True,
    }


GLM = ModelFamily(
    "GlmForCausalLM",
    "glm",
    PARAMETERS,
    required=("num_key_value_heads", "rms_norm_eps"),
    keys=frozenset({"attention_bias"}),
    rotary_percent=half_rotary,
    settings=glm_settings,
    defaults={"head_dim": 128, "max_position_embeddings": 131072},
    published=("glm-4-9b", "glm-edge"),
    tiny={"head_dim": 16, "attention_bias": True},
)
register_model_family(GLM)
