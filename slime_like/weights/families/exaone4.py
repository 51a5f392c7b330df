"""EXAONE 4: norms of the outputs of attention and MLP in place of those of their inputs, norms of
queries and keys by head. Where some layers have a sliding window, the others have no rotary
embedding."""

from __future__ import annotations

from slime_like.weights.families import olmo, qwen3
from slime_like.weights.families.base import (
    ATTENTION,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
)
from slime_like.weights.mappings import Mapping

PARAMETERS: dict[str, Mapping] = {
    **olmo.POST_NORM_PARAMETERS,
    **{
        name: mapping
        for name, mapping in qwen3.PARAMETERS.items()
        if name.startswith((f"{ATTENTION}.q_layernorm", f"{ATTENTION}.k_layernorm"))
    },
}


DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}


def windows(reader: ConfigReader) -> list[bool]:
    """By `sliding_window_pattern`: "LLLG", local and global layers, where the last layer of the
    model is global too, or a number of layers, the last of which is global."""
    pattern = reader.config.get("sliding_window_pattern") or 4
    layers = reader.number("num_hidden_layers")
    if isinstance(pattern, str):
        return [pattern[n % len(pattern)] == "L" and n < layers - 1 for n in range(layers)]
    return [(n + 1) % pattern != 0 for n in range(layers)]


def rotated_in_windows(reader: ConfigReader) -> dict[str, object]:
    """megatron-core's setting for layers without rotary embedding: those without a window, if some
    have one."""
    config = reader.config
    if config.get("sliding_window") is None:
        return {}
    kinds = config.get("layer_types")
    used = [kind == "sliding_attention" for kind in kinds] if kinds else windows(reader)
    return {"no_rope_freq": [int(not window) for window in used]}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {**olmo.POST_NORM_SETTINGS, **rotated_in_windows(reader)}


register_model_family(
    ModelFamily(
        "Exaone4ForCausalLM",
        "exaone4",
        PARAMETERS,
        required=("num_key_value_heads",),
        keys=frozenset({"sliding_window_pattern"}),
        settings=_settings,
        windows=windows,
        defaults=DEFAULTS,
        layer_types=WINDOWS,
        published=("EXAONE-4",),
        tiny={"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
    )
)
