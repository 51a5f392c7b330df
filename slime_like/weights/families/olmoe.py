"""OLMoE: Qwen3-MoE's experts, norms over all heads of queries or keys at once."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import olmo, qwen3_moe
from slime_like.weights.families.base import ConfigReader, ModelFamily, register_model_family
from slime_like.weights.families.experts import REQUIRED, expert_settings
from slime_like.weights.mappings import Mapping

EXPERTS = dataclasses.replace(qwen3_moe.EXPERTS, ffn="intermediate_size", dense_layers=False)
PARAMETERS: dict[str, Mapping] = {**qwen3_moe.PARAMETERS, **olmo.NORMS_OF_ALL_HEADS}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {
        **expert_settings(reader, EXPERTS),
        "qk_layernorm": True,
        "qk_norm_of_all_heads": True,
    }


register_model_family(
    ModelFamily(
        "OlmoeForCausalLM",
        "olmoe",
        PARAMETERS,
        required=REQUIRED,
        keys=EXPERTS.keys,
        settings=_settings,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        published=("OLMoE-",),
        tiny={"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    )
)
