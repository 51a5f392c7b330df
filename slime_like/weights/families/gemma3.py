"""Gemma 3, text only: zero-centered norms before and after attention and MLP, five layers with a
sliding window and their own rotary base for each one without, embeddings scaled by sqrt(hidden)."""

from __future__ import annotations

from slime_like.weights.families import qwen3
from slime_like.weights.families.base import (
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
    window_theta,
)
from slime_like.weights.mappings import Mapping, Replicated

# megatron-core norm -> Hugging Face norm
NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
PARAMETERS: dict[str, Mapping] = {
    **qwen3.PARAMETERS,
    **{
        f"decoder.layers.{{layer}}.{name}.weight": Replicated(
            f"model.layers.{{layer}}.{hf_name}.weight"
        )
        for name, hf_name in NORMS.items()
    },
}
ACTIVATION = "gelu_pytorch_tanh"
KEYS = {
    "hidden_activation",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "cache_implementation",
}
DEFAULTS = {
    **{"tie_word_embeddings": True, "sliding_window": 4096, "max_position_embeddings": 131072},
}
PATTERN = {"sliding_window_pattern", "_sliding_window_pattern"}


def _settings(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    if (activation := config.get("hidden_activation", ACTIVATION)) != ACTIVATION:
        reader.refuse(f"hidden_activation {activation!r} is not supported; give {ACTIVATION!r}")
    scale = reader.number("query_pre_attn_scalar", default=256, whole=False)
    return {
        "activation_func": "gelu_tanh",
        "softmax_scale": float(scale) ** -0.5,
        "layernorm_zero_centered_gamma": True,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "window_rotary_base": window_theta(reader, "rope_local_base_freq"),
        "embedding_scale": float(reader.number("hidden_size")) ** 0.5,
    }


def _five_of_six(reader: ConfigReader) -> list[bool]:
    every = reader.config.get("_sliding_window_pattern")
    every = every or reader.number("sliding_window_pattern", default=6)
    return [(n + 1) % every != 0 for n in range(reader.number("num_hidden_layers"))]


register_model_family(
    ModelFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        PARAMETERS,
        required=("num_key_value_heads", "head_dim"),
        keys=frozenset(KEYS | PATTERN),
        qk_norm=True,
        settings=_settings,
        windows=_five_of_six,
        defaults=DEFAULTS,
        layer_types=WINDOWS,
        rope_theta=1e6,
        published=("gemma-3-270m", "gemma-3-1b"),
        tiny={
            # a hidden size whose square root, the scale of the embeddings, is rounded
            **{"hidden_size": 44, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
            **{"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    )
)
