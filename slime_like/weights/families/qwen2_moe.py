"""Qwen2 with experts, one of which, behind a gate, is shared by all tokens."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import qwen2, qwen3_moe
from slime_like.weights.families.base import HF_MLP, MLP, ModelFamily, register_model_family
from slime_like.weights.families.experts import REQUIRED, expert_parameters, expert_settings
from slime_like.weights.mappings import GatedMLP, Mapping, ReplicatedRows, RowParallel

SHARED_FFN = "shared_expert_intermediate_size"
PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
    f"{MLP}.shared_experts.linear_fc1.weight": GatedMLP(
        f"{HF_MLP}.shared_expert.gate_proj.weight",
        f"{HF_MLP}.shared_expert.up_proj.weight",
        "shared_ffn",
    ),
    f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(
        f"{HF_MLP}.shared_expert.down_proj.weight", "shared_ffn"
    ),
    f"{MLP}.shared_experts.gate_weight": ReplicatedRows(
        f"{HF_MLP}.shared_expert_gate.weight", "one"
    ),
}
EXPERTS = dataclasses.replace(qwen3_moe.EXPERTS, shared=SHARED_FFN)

register_model_family(
    ModelFamily(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        PARAMETERS,
        required=(*REQUIRED, "moe_intermediate_size", SHARED_FFN),
        keys=EXPERTS.keys,
        qkv_bias=True,
        settings=lambda reader: expert_settings(reader, EXPERTS),
        published=("Qwen1.5-MoE", "Qwen2-57B-A14B"),
        tiny={
            **{"moe_intermediate_size": 24, SHARED_FFN: 40, "num_experts": 4},
            **{"num_experts_per_tok": 2, "decoder_sparse_step": 2},
        },
    )
)
