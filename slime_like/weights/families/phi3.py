"""Phi-3 and Phi-4: Llama with query, key and value in one tensor, gate and up in another, and
rotary embedding of a share of each head. Files with longrope are rejected by the reader."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    HF_MLP,
    MLP,
    ConfigReader,
    ModelFamily,
    every_layer,
    register_model_family,
    require_values,
)
from slime_like.weights.mappings import Mapping, StackedGatedMLP, StackedQKV

PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.linear_qkv.weight": StackedQKV(
        f"{HF_ATTENTION}.qkv_proj.weight", f"{HF_ATTENTION}.key", f"{HF_ATTENTION}.value"
    ),
    f"{MLP}.linear_fc1.weight": StackedGatedMLP(f"{HF_MLP}.gate_up_proj.weight"),
}
DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _settings(reader: ConfigReader) -> dict[str, object]:
    require_values(reader, DROPOUT)
    return {}


def _whole(reader: ConfigReader) -> float:
    return 1.0


register_model_family(
    ModelFamily(
        "Phi3ForCausalLM",
        "phi3",
        PARAMETERS,
        required=("num_key_value_heads",),
        keys=frozenset({*DROPOUT, "original_max_position_embeddings"}),
        rotary_percent=_whole,
        settings=_settings,
        windows=every_layer,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        published=("Phi-3-mini-4k", "Phi-3-medium-4k", "phi-4"),
        tiny={
            "sliding_window": 6,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
            },
        },
    )
)
