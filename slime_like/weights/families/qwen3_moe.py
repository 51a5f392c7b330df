"""Qwen3-MoE."""

from __future__ import annotations

from slime_like.weights.families import qwen3
from slime_like.weights.families.base import HF_MLP, ModelFamily, register_model_family
from slime_like.weights.families.experts import (
    REQUIRED,
    ExpertKeys,
    expert_parameters,
    expert_settings,
)
from slime_like.weights.mappings import Mapping

PARAMETERS: dict[str, Mapping] = {
    **qwen3.PARAMETERS,
    **expert_parameters(HF_MLP, "gate_proj", "up_proj", "down_proj"),
}
EXPERTS = ExpertKeys(
    experts=("num_experts", "num_local_experts"),
    ffn="moe_intermediate_size",
    norm_topk=("norm_topk_prob", False),
    dense_layers=True,
)

register_model_family(
    ModelFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        PARAMETERS,
        required=(*REQUIRED, "head_dim", "moe_intermediate_size"),
        keys=EXPERTS.keys,
        qk_norm=True,
        settings=lambda reader: expert_settings(reader, EXPERTS),
        defaults={"max_position_embeddings": 32768},
        published=("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder"),
        tiny={
            **{"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4},
            **{"num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1]},
        },
    )
)
