"""SmolLM3: Llama, with some layers without rotary embedding (NoPE)."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import ConfigReader, ModelFamily, register_model_family


def _settings(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    layers = int(reader.number("num_hidden_layers"))
    rotated = config.get("no_rope_layers")  # 1: the layer has a rotary embedding
    if rotated is None:
        every = int(reader.number("no_rope_layer_interval", default=4))
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        reader.refuse(f"no_rope_layers {rotated!r}: must hold 0 or 1 for each of {layers} layers")
        return {}
    return {"no_rope_freq": [1 - one for one in rotated]}


register_model_family(
    ModelFamily(
        "SmolLM3ForCausalLM",
        "smollm3",
        llama.PARAMETERS,
        required=("num_key_value_heads",),
        keys=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
        settings=_settings,
        defaults={"tie_word_embeddings": True, "max_position_embeddings": 32768},
        rope_theta=2e6,
        published=("SmolLM3-3B",),
        tiny={"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    )
)
