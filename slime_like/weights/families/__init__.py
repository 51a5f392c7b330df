"""Model families, one file each. To add one, add a file and its import line."""

from slime_like.weights.families import (  # noqa: F401  (each registers its family)
    deepseek_v3,
    deepseek_v32,
    exaone4,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    shells,
    smollm3,
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
