"""Qwen2-MoE: MoE with a gated shared expert."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import qwen2, qwen3_moe
from slime_like.weights.families.base import HF_MLP, MLP, ModelFamily, register_model_family
from slime_like.weights.families.experts import (
    REQUIRED,
    expert_parameters,
    expert_settings,
    shared_expert_parameters,
)
from slime_like.weights.mappings import Mapping, ReplicatedRows

SHARED_FFN = "shared_expert_intermediate_size"
PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
    **shared_expert_parameters(f"{HF_MLP}.shared_expert"),
    f"{MLP}.shared_experts.gate_weight": ReplicatedRows(
        f"{HF_MLP}.shared_expert_gate.weight", "one"
    ),
}
EXPERTS = dataclasses.replace(qwen3_moe.EXPERTS, shared=SHARED_FFN)
TINY = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    SHARED_FFN: 40,
}

register_model_family(
    ModelFamily(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        PARAMETERS,
        required=(*REQUIRED, "moe_intermediate_size", SHARED_FFN),
        keys=EXPERTS.keys,
        qkv_bias=True,
        settings=lambda reader: expert_settings(reader, EXPERTS),
        defaults={"max_position_embeddings": 32768},
        published=("Qwen1.5-MoE", "Qwen2-57B-A14B"),
        tiny={**TINY, "decoder_sparse_step": 2},
    )
)
