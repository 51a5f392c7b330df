"""Read the sliding-window settings of a Hugging Face config.json."""

from __future__ import annotations

from slime_like.weights.families import ConfigReader, ModelFamily

SLIDING = "sliding_attention"


def read_windows(reader: ConfigReader, family: ModelFamily) -> dict[str, object]:
    """megatron-core's window settings. Its `window_size` counts the tokens before the query, while
    `sliding_window` of config.json includes the query. For an architecture without windows here,
    the keys are rejected only if a layer would use a window."""
    config = reader.config
    kinds = reader.config.get("layer_types") or []
    if unknown := set(kinds) - family.layer_types:
        legal = " and ".join(map(repr, sorted(family.layer_types))) or "no such key"
        names = ", ".join(map(repr, sorted(unknown)))
        reader.refuse(f"layer_types {names}: only {legal} is supported")
        return {}
    size = config.get("sliding_window")
    switch = config.get("use_sliding_window")
    if family.windows is None:
        layers = reader.number("num_hidden_layers")
        if switch and size is not None and config.get("max_window_layers", 0) < layers:
            reader.refuse(
                f"sliding_window {size!r}: sliding windows are not supported with this architecture"
            )
        return {}
    given = SLIDING in family.layer_types and kinds
    windowed = [kind == SLIDING for kind in kinds] if given else family.windows(reader)
    off = size is None or switch is False
    if off or not any(windowed):
        if given and any(windowed):
            reader.refuse(f"layer_types has {SLIDING!r}, but sliding_window {size!r} is not in use")
        return {}
    if len(windowed) != reader.number("num_hidden_layers"):
        reader.refuse(f"layer_types has {len(windowed)} layers; it must have num_hidden_layers")
    return {
        "window_size": (reader.number("sliding_window") - 1, 0),
        "window_attn_skip_freq": None if all(windowed) else [int(used) for used in windowed],
    }
