"""OLMo 2 and 3: norms of the outputs of attention and MLP in place of those of their inputs, and
norms over all heads of queries or keys at once. OLMo 3 has windows in three of four layers, with a
plain rotary embedding, while the others may have YaRN."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
    window_theta,
)
from slime_like.weights.mappings import Mapping, Replicated

LAYER = "decoder.layers.{layer}"
# our norm -> norm of the file
POST_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_PRE_NORMS = (f"{LAYER}.input_layernorm.weight", f"{LAYER}.pre_mlp_layernorm.weight")
# of a family whose only norms in a layer are those of outputs
POST_NORM_PARAMETERS: dict[str, Mapping] = {
    **{name: mapping for name, mapping in llama.PARAMETERS.items() if name not in _PRE_NORMS},
    **{
        f"{LAYER}.{name}.weight": Replicated(f"model.layers.{{layer}}.{hf_name}.weight")
        for name, hf_name in POST_NORMS.items()
    },
}
POST_NORM_SETTINGS: dict[str, object] = {
    "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
    "without_pre_norms": True,
    "qk_layernorm": True,
}
NORMS_OF_ALL_HEADS: dict[str, Mapping] = {
    f"{ATTENTION}.q_layernorm.weight": Replicated(f"{HF_ATTENTION}.q_norm.weight", "query"),
    f"{ATTENTION}.k_layernorm.weight": Replicated(f"{HF_ATTENTION}.k_norm.weight", "key_value"),
}
PARAMETERS: dict[str, Mapping] = {**POST_NORM_PARAMETERS, **NORMS_OF_ALL_HEADS}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {**POST_NORM_SETTINGS, "qk_norm_of_all_heads": True}


def _settings_with_windows(reader: ConfigReader) -> dict[str, object]:
    return {**_settings(reader), "window_rotary_base": window_theta(reader, default=500000.0)}


def three_of_four(reader: ConfigReader) -> list[bool]:
    return [(n + 1) % 4 != 0 for n in range(reader.number("num_hidden_layers"))]


OLMO2 = ModelFamily(
    "Olmo2ForCausalLM",
    "olmo2",
    PARAMETERS,
    settings=_settings,
    defaults={"rms_norm_eps": 1e-5},
    published=("OLMo-2",),
    tiny={"num_key_value_heads": 2},
)
register_model_family(OLMO2)
register_model_family(
    dataclasses.replace(
        OLMO2,
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        settings=_settings_with_windows,
        windows=three_of_four,
        rope_theta=500000.0,
        defaults={**OLMO2.defaults, "sliding_window": 4096},
        layer_types=WINDOWS,
        published=("Olmo-3",),
        tiny={"sliding_window": 6},
    )
)
