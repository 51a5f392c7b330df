"""Seed-OSS: Qwen2 with an explicit head size."""

from __future__ import annotations

from slime_like.weights.families import qwen2
from slime_like.weights.families.base import ConfigReader, ModelFamily, register_model_family


def _settings(reader: ConfigReader) -> dict[str, object]:
    if reader.config.get("attention_out_bias"):
        reader.refuse("attention_out_bias True: a bias on the output projection is not supported")
    return {"add_qkv_bias": bool(reader.config.get("attention_bias", True))}


register_model_family(
    ModelFamily(
        "SeedOssForCausalLM",
        "seed_oss",
        qwen2.PARAMETERS,
        required=("num_key_value_heads", "head_dim"),
        # dropout is never read from a file
        keys=frozenset({"attention_bias", "attention_out_bias", "residual_dropout"}),
        settings=_settings,
        defaults={"attention_dropout": 0.1, "max_position_embeddings": 524288},
        published=("Seed-OSS-36B",),
        tiny={"head_dim": 16, "attention_bias": True},
    )
)
