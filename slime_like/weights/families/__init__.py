"""Model families, one file each. A new one is a file and its import line."""

from slime_like.weights.families import (  # noqa: F401  (each registers its family)
    deepseek_v3,
    llama,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from slime_like.weights.families.base import (
    EMBEDDING,
    LM_HEAD,
    OUTPUT_LAYER,
    ConfigReader,
    ModelFamily,
    model_families,
    register_model_family,
)

__all__ = [
    "EMBEDDING",
    "LM_HEAD",
    "OUTPUT_LAYER",
    "ConfigReader",
    "ModelFamily",
    "model_families",
    "register_model_family",
]
