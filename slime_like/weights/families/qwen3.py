"""Qwen3: Llama with norms of queries and keys."""

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
from slime_like.weights.mappings import Mapping, Replicated

PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.q_layernorm.weight": Replicated(f"{HF_ATTENTION}.q_norm.weight", "head_dim"),
    f"{ATTENTION}.k_layernorm.weight": Replicated(f"{HF_ATTENTION}.k_norm.weight", "head_dim"),
}

register_model_family(
    ModelFamily(
        "Qwen3ForCausalLM",
        "qwen3",
        PARAMETERS,
        required=("num_key_value_heads", "head_dim"),
        qk_norm=True,
        windows=after_max_window_layers,
        defaults={"max_position_embeddings": 32768},
        layer_types=WINDOWS,
        published=("Qwen3-", "DeepSeek-R1-0528-Qwen3"),
        tiny={"head_dim": 16},
    )
)
