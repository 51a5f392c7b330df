"""MiMo-V2-Flash: keys and values of different sizes, scaled values, layers with a sliding window,
learned sinks and their own number of key heads among layers without, partial rotary embedding,
DeepSeek-V3's experts without shared ones."""

from __future__ import annotations

from typing import Any

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
    window_theta,
)
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    sigmoid_experts,
)
from slime_like.weights.layer_sizes import SizedOutput, SizedQKV, SizedSinks
from slime_like.weights.mappings import Mapping

PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.linear_qkv.weight": SizedQKV(
        f"{HF_ATTENTION}.q_proj.weight",
        f"{HF_ATTENTION}.k_proj.weight",
        f"{HF_ATTENTION}.v_proj.weight",
    ),
    f"{ATTENTION}.linear_proj.weight": SizedOutput(f"{HF_ATTENTION}.o_proj.weight", "query"),
    f"{ATTENTION}.core_attention.softmax_offset": SizedSinks(f"{HF_ATTENTION}.attention_sink_bias"),
    **EXPERT_PARAMETERS,
}
PATTERN = "hybrid_layer_pattern"  # 1: with a window
WINDOW_SIZE = "sliding_window_size"  # tokens before the query
ROTATED = 0.334  # transformers' default share of a head
KEYS = EXPERT_KEYS | {
    *(PATTERN, WINDOW_SIZE, "v_head_dim", "attention_value_scale", "layernorm_epsilon"),
    *("swa_num_attention_heads", "swa_num_key_value_heads"),
    *("swa_head_dim", "swa_v_head_dim", "swa_rope_theta"),
    *("add_swa_attention_sink_bias", "add_full_attention_sink_bias"),
    *("attention_chunk_size", "attention_projection_layout"),
}


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """The patterns of layers and the window as transformers names them. Null as
    `attention_value_scale` is 1."""
    config = dict(config)
    layers = config.get("num_hidden_layers")
    pattern = config.get(PATTERN)
    experts = config.get("moe_layer_freq")
    if pattern is None and isinstance(layers, int):  # transformers' default
        pattern = [int(n > 0 and (n + 1) % 6 != 0) for n in range(layers)]
    if config.get("layer_types") is None and pattern is not None:
        config["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in pattern
        ]
    if isinstance(experts, list):
        del config["moe_layer_freq"]
        config.setdefault("mlp_layer_types", ["sparse" if e else "dense" for e in experts])
    elif config.get("mlp_layer_types") is None and isinstance(layers, int):
        config["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    if isinstance(before := config.get(WINDOW_SIZE), int):
        config["sliding_window"] = before + 1
    if "attention_value_scale" in config and config["attention_value_scale"] is None:
        config["attention_value_scale"] = 1.0
    return config


def _settings(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    heads = reader.number("num_attention_heads")
    groups = reader.number("num_key_value_heads")
    require_values(
        reader,
        {
            "swa_head_dim": reader.number("head_dim"),
            "swa_v_head_dim": reader.number("v_head_dim"),
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
        },
    )
    rope = config.get("rope_parameters") or {}
    shares = {
        kind: (rope.get(kind) or {}).get("partial_rotary_factor", ROTATED) for kind in WINDOWS
    }
    if len(set(shares.values())) > 1:
        reader.refuse(f"partial_rotary_factor {shares!r} that differs by layer is not supported")
    window_heads = reader.number("swa_num_attention_heads", default=heads)
    window_groups = reader.number("swa_num_key_value_heads", default=2 * groups)
    if window_heads % window_groups:
        reader.refuse(
            f"{window_groups} key heads of layers with a window (swa_num_key_value_heads, or twice "
            f"num_key_value_heads) do not divide their {window_heads} heads"
        )
    return {
        **sigmoid_experts(reader, shared_experts=False),
        "window_heads": window_heads,
        "window_groups": window_groups,
        "value_channels": reader.number("v_head_dim"),
        "value_scale": float(reader.number("attention_value_scale", 0.707, whole=False)),
        "softmax_type": "learnable",
        "sinks_of_windows": True,
        "window_rotary_base": window_theta(reader, "swa_rope_theta"),
    }


def _rotated(reader: ConfigReader) -> float:
    return ROTATED


def _windows(reader: ConfigReader) -> list[bool]:
    return [kind == "sliding_attention" for kind in reader.config["layer_types"]]


register_model_family(
    ModelFamily(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        PARAMETERS,
        required=(
            *("num_key_value_heads", "head_dim", "v_head_dim", "sliding_window"),
            *EXPERTS_REQUIRED,
        ),
        keys=KEYS,
        rotary_percent=_rotated,
        windows=_windows,
        layer_types=WINDOWS,
        meant=_meant,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        stand_ins={"rms_norm_eps": "layernorm_epsilon"},
        settings=_settings,
        rope_theta=5e6,
        untrained_prefixes=("model.mtp.",),
        published=("MiMo-V2-Flash",),
        tiny={
            **{"head_dim": 12, "v_head_dim": 7, "sliding_window": 6, "n_routed_experts": 8},
            **{"num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 1},
            **{"topk_group": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
            "attention_value_scale": 0.7,
            "layer_types": ("full_attention", "sliding_attention"),
            "mlp_layer_types": ("dense", "sparse"),
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334}
                },
                "sliding_attention": {
                    **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}
                },
            },
        },
    )
)
