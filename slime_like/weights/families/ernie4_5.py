"""ERNIE 4.5, dense: Llama with an interleaved rotary embedding. `use_bias` is rejected when set."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import ConfigReader, ModelFamily, register_model_family


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {"rotary_interleaved": True}


register_model_family(
    ModelFamily(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        llama.PARAMETERS,
        required=("num_key_value_heads", "rms_norm_eps"),
        settings=_settings,
        defaults={
            **{"tie_word_embeddings": True, "head_dim": 128, "max_position_embeddings": 131072},
        },
        rope_theta=500000.0,
        published=("ERNIE-4.5-0.3B",),
        tiny={"head_dim": 16, "tie_word_embeddings": True},
    )
)
