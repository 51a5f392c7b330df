"""Mistral and Ministral: Llama with a sliding window in all layers (v0.1), none, or some
(Ministral); Ministral 3, whose queries are scaled by their position."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    WINDOWS,
    ConfigReader,
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


def _settings(reader: ConfigReader) -> dict[str, object]:
    """Takes the keys of the scale, which transformers has among those of the rotary embedding, out
    of them."""
    rope = dict(reader.config.get("rope_parameters") or {})
    rope.pop("max_position_embeddings", None)
    beta = rope.pop("llama_4_scaling_beta", None) or 0.0
    reader.config["rope_parameters"] = rope
    length = rope.get("original_max_position_embeddings") or 0
    if isinstance(beta, bool) or not isinstance(beta, int | float) or (beta and length <= 0):
        reader.refuse(
            f"llama_4_scaling_beta {beta!r} must be a number, with a positive "
            "original_max_position_embeddings"
        )
        return {}
    return {"query_scale_beta": float(beta), "query_scale_length": length} if beta else {}


register_model_family(
    dataclasses.replace(
        MISTRAL,
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        settings=_settings,
        published=(),  # those have a vision tower
        tiny={
            "head_dim": 16,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
                "original_max_position_embeddings": 16,
            },
        },
    )
)
