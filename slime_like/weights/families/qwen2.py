"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    WINDOWS,
    ModelFamily,
    after_max_window_layers,
    register_model_family,
)
from slime_like.weights.mappings import QKV, Mapping

PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.linear_qkv.bias": QKV(
        f"{HF_ATTENTION}.q_proj.bias",
        f"{HF_ATTENTION}.k_proj.bias",
        f"{HF_ATTENTION}.v_proj.bias",
        bias=True,
    ),
}

QWEN2 = ModelFamily(
    "Qwen2ForCausalLM",
    "qwen2",
    PARAMETERS,
    required=("num_key_value_heads",),
    qkv_bias=True,
    windows=after_max_window_layers,
    defaults={"max_position_embeddings": 32768},
    layer_types=WINDOWS,
    published=("Qwen2-", "Qwen2.5", "DeepSeek-R1-Distill-Qwen"),
)
register_model_family(QWEN2)
