"""Mistral and Ministral: Llama with a sliding window in all layers (v0.1), none, or some
(Ministral)."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    WINDOWS,
    ModelFamily,
    every_layer,
    register_model_family,
)

MISTRAL = ModelFamily(
    "MistralForCausalLM",
    "mistral",
    llama.PARAMETERS,
    required=("num_key_value_heads",),
    windows=every_layer,
    defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
    published=("Mistral-7B", "Mistral-Nemo"),
    tiny={"head_dim": 16, "sliding_window": 6},
)
register_model_family(MISTRAL)
register_model_family(
    dataclasses.replace(
        MISTRAL,
        architecture="MinistralForCausalLM",
        model_type="ministral",
        layer_types=WINDOWS,
        published=("Ministral-8B",),
    )
)
