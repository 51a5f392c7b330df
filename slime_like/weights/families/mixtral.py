"""Mixtral: Llama with MoE in every layer."""

from __future__ import annotations

from slime_like.weights.families import llama
from slime_like.weights.families.base import ModelFamily, every_layer, register_model_family
from slime_like.weights.families.experts import (
    REQUIRED,
    ExpertKeys,
    expert_parameters,
    expert_settings,
)
from slime_like.weights.mappings import Mapping

PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    **expert_parameters("model.layers.{layer}.block_sparse_moe", "w1", "w3", "w2"),
}
EXPERTS = ExpertKeys(experts=("num_local_experts",), ffn="intermediate_size")

register_model_family(
    ModelFamily(
        "MixtralForCausalLM",
        "mixtral",
        PARAMETERS,
        required=(*REQUIRED, "num_local_experts"),
        keys=EXPERTS.keys,
        windows=every_layer,
        rope_theta=1e6,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        settings=lambda reader: expert_settings(reader, EXPERTS),
        published=("Mixtral",),
        tiny={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    )
)
