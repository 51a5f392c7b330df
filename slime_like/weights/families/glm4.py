"""GLM-4 and GLM-Z1 (9B, 32B): interleaved rotary embedding of half of each head, post-norms after
attention and MLP."""

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
from slime_like.weights.mappings import Mapping, Replicated, StackedGatedMLP

PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    f"{MLP}.linear_fc1.weight": StackedGatedMLP(f"{HF_MLP}.gate_up_proj.weight"),
    **{
        f"decoder.layers.{{layer}}.{norm}.weight": Replicated(
            f"model.layers.{{layer}}.{norm}.weight"
        )
        for norm in ("post_self_attn_layernorm", "post_mlp_layernorm")
    },
}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {
        "add_qkv_bias": bool(reader.config.get("attention_bias", True)),
        "rotary_interleaved": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


register_model_family(
    ModelFamily(
        "Glm4ForCausalLM",
        "glm4",
        PARAMETERS,
        required=("num_key_value_heads", "rms_norm_eps"),
        keys=frozenset({"attention_bias"}),
        rotary_percent=half_rotary,
        settings=_settings,
        published=("GLM-4-9B-0414", "GLM-4-32B", "GLM-Z1"),
        tiny={"head_dim": 16, "attention_bias": True},
    )
)
