"""The rotary embedding of a Hugging Face config.json, in the formats of transformers 4
(`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)."""

from __future__ import annotations

from typing import Any

from slime_like.weights.families import ConfigReader

# megatron-core's rotary embedding has these numbers of Llama 3.1 built in; only the factor is an
# argument.
LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *LLAMA3_FIXED}),
}
DEFAULT_ROPE_THETA = 10000.0  # transformers' default_theta


def read_rope(reader: ConfigReader) -> dict[str, Any]:
    """rope_theta, rope_type ("default", "linear" or "llama3") and factor, from either generation's
    keys."""
    config = reader.config
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if old and new and old != new:
        reader.refuse("rope_scaling and rope_parameters differ; keep one of them")
    given = dict(new or old)
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    legacy_type = given.pop("type", "default")  # the key's name before transformers 4.43
    rope_type = given.pop("rope_type", legacy_type)
    result = {"rope_theta": theta, "rope_type": rope_type, "factor": given.get("factor", 1.0)}
    if partial not in (None, 1, 1.0):
        reader.refuse(f"partial_rotary_factor {partial!r}: partial rotation is not supported")
    if not isinstance(theta, int | float) or theta <= 0:
        reader.refuse(f"rope_theta must be a positive number, not {theta!r}")
        result["rope_theta"] = DEFAULT_ROPE_THETA
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
    if rope_type == "llama3":
        for key, only in LLAMA3_FIXED.items():
            if given.get(key) != only:
                reader.refuse(
                    f"rope_type 'llama3' with {key} {given.get(key)!r} is not supported: megatron-core fixes it at {only}"
                )
    return result
