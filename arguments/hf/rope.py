"""The rotary embedding of a Hugging Face config.json, in the formats of transformers 4
(`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from slime_like.weights.families import ConfigReader

# our setting of Llama 3's rotary embedding -> key, and the number that megatron-core has
LLAMA3 = {
    "llama3_low_frequency": ("low_freq_factor", 1.0),
    "llama3_high_frequency": ("high_freq_factor", 4.0),
    "llama3_original_length": ("original_max_position_embeddings", 8192),
}
ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *(key for key, _ in LLAMA3.values())}),
    "yarn": frozenset(
        [
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "attention_factor",
            "truncate",
        ]
    ),
}
# multimodal rope: for text all position axes are equal, so these have no effect
OF_IMAGES = ("mrope_section", "mrope_interleaved")


class Rope(TypedDict):
    """Rope settings."""

    rope_theta: float
    rope_type: str  # one of `ROPE_KEYS`
    factor: float
    percent: float  # fraction of each head's dimensions that is rotated
    yarn: dict[str, object]  # megatron-core's YaRN settings, empty for other types
    llama3: dict[str, object]  # settings in `LLAMA3`, empty where they are megatron-core's


def read_rope(
    reader: ConfigReader,
    rotary_percent: Callable[[ConfigReader], float] | None,
    default_theta: float,
) -> Rope:
    """Read the rope settings in the format of transformers 4 or 5. rotary_percent, default_theta:
    see `ModelFamily`."""
    config = reader.config
    given = _rope_keys(reader)
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    legacy_type = given.pop("type", "default")  # the key's name before transformers 4.43
    rope_type = given.pop("rope_type", legacy_type)
    if rope_type == "mrope":  # three axes, of equal positions for text
        rope_type = "default"
    percent = 1.0
    if rotary_percent is not None:
        percent = rotary_percent(reader) if partial is None else partial
    result = Rope(
        rope_theta=theta,
        rope_type=rope_type,
        factor=given.get("factor", 1.0),
        percent=percent,
        yarn={},
        llama3={},
    )
    if rotary_percent is None and partial not in (None, 1, 1.0):
        reader.refuse(
            f"partial_rotary_factor {partial!r}: partial rotation is not supported with this "
            "architecture"
        )
    elif not 0 < result["percent"] <= 1:
        reader.refuse(f"partial_rotary_factor must be in 0 < x <= 1, not {partial!r}")
        result["percent"] = 1.0
    if not isinstance(theta, int | float) or theta <= 0:
        reader.refuse(f"rope_theta must be a positive number, not {theta!r}")
        result["rope_theta"] = default_theta
    if rope_type not in ROPE_KEYS:
        reader.refuse(
            f"rope_type {rope_type!r} is not supported; legal values: {', '.join(ROPE_KEYS)}"
        )
        return result
    for key in sorted(given.keys() - ROPE_KEYS[rope_type]):
        reader.refuse(f"rope_type {rope_type!r} with {key} {given[key]!r} is not supported")
    if rope_type != "default" and not (
        isinstance(result["factor"], int | float) and result["factor"] >= 1 and "factor" in given
    ):
        reader.refuse(f"rope_type {rope_type!r} needs a factor >= 1, not {given.get('factor')!r}")
        result["factor"] = 1.0
    if rope_type == "yarn":
        result["yarn"] = _yarn(reader, given, result["factor"])
    if rope_type == "llama3":
        result["llama3"] = _llama3(reader, given)
    return result


def _rope_keys(reader: ConfigReader) -> dict[str, Any]:
    """The content of rope_parameters or rope_scaling that affects text."""
    old = reader.config.get("rope_scaling") or {}
    new = reader.config.get("rope_parameters") or {}
    if isinstance(full := new.get("full_attention"), dict):  # Gemma 3: one per layer type
        new = full
    if old and new and old != new:
        reader.refuse("rope_scaling and rope_parameters differ; keep one of them")
    return {key: value for key, value in (new or old).items() if key not in OF_IMAGES}


def _llama3(reader: ConfigReader, given: Mapping[str, Any]) -> dict[str, object]:
    """The settings in `LLAMA3`, if any is not megatron-core's."""
    found: dict[str, Any] = {name: given.get(key) for name, (key, _) in LLAMA3.items()}
    low, high, length = found.values()
    legal = all(isinstance(x, int | float) and x > 0 for x in (low, high, length))
    if not legal or not low < high or length != int(length):
        reader.refuse(
            f"rope_type 'llama3' with low_freq_factor {low!r}, high_freq_factor {high!r} and "
            f"original_max_position_embeddings {length!r} is not supported: the factors must be "
            "positive, the high one larger, and the length a positive integer"
        )
        return {}
    if all(found[name] == usual for name, (_, usual) in LLAMA3.items()):
        return {}
    return {**found, "llama3_original_length": int(length)}


def _yarn(reader: ConfigReader, given: Mapping[str, Any], factor: float) -> dict[str, object]:
    """megatron-core's settings for YaRN (arXiv 2309.00071), with transformers' defaults.
    attention_factor scales cosines and sines; megatron-core computes it as 1 + 0.1 mscale
    ln(factor)."""
    length = given.get("original_max_position_embeddings")
    if not isinstance(length, int) or length <= 0:
        reader.refuse(
            "rope_type 'yarn' needs original_max_position_embeddings, a positive integer, not "
            f"{length!r}"
        )
    mscale = given.get("mscale")
    of_all = given.get("mscale_all_dim")
    if not mscale or not of_all:
        mscale = 1.0
        of_all = 0.0
    if (scale := given.get("attention_factor")) is not None:
        if factor > 1:
            mscale = (scale - 1) / (0.1 * math.log(factor))
            of_all = 0.0
        elif scale != 1:
            reader.refuse(
                f"rope_type 'yarn' with attention_factor {scale!r} needs a factor above 1"
            )
    return {
        "yarn_rotary_scaling_factor": float(factor),
        "yarn_original_max_position_embeddings": length,
        "yarn_beta_fast": float(given.get("beta_fast") or 32),
        "yarn_beta_slow": float(given.get("beta_slow") or 1),
        "yarn_mscale": float(mscale),
        "yarn_mscale_all_dim": float(of_all),
        "yarn_correction_range_round_to_int": given.get("truncate") is not False,
    }
