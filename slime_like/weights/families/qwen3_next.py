"""Qwen3-Next: gated delta nets and gated attention, MoE with a gated shared expert."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import qwen2_moe, qwen3_moe
from slime_like.weights.families.base import MLP, ModelFamily, register_model_family
from slime_like.weights.families.delta_net import (
    HF_DELTA,
    KEYS,
    LAYER_TYPES,
    REQUIRED,
    TINY,
    DeltaProjection,
    delta_parameters,
    delta_settings,
    quarter_rotary,
)
from slime_like.weights.families.experts import expert_settings
from slime_like.weights.families.prediction import QWEN_PREDICTION
from slime_like.weights.mappings import Mapping

PARAMETERS: dict[str, Mapping] = {
    **delta_parameters(
        DeltaProjection(f"{HF_DELTA}.in_proj_qkvz.weight", f"{HF_DELTA}.in_proj_ba.weight")
    ),
    **{name: m for name, m in qwen2_moe.PARAMETERS.items() if name.startswith(MLP)},
}
EXPERTS = dataclasses.replace(
    qwen3_moe.EXPERTS, shared=qwen2_moe.SHARED_FFN, norm_topk=("norm_topk_prob", True)
)

register_model_family(
    ModelFamily(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        PARAMETERS,
        required=(*REQUIRED, "num_experts_per_tok", "moe_intermediate_size", qwen2_moe.SHARED_FFN),
        keys=KEYS | EXPERTS.keys,
        qk_norm=True,
        rotary_percent=quarter_rotary,
        settings=lambda reader: delta_settings(reader) | expert_settings(reader, EXPERTS),
        defaults={"max_position_embeddings": 32768},
        layer_types=LAYER_TYPES,
        untrained_prefixes=("mtp.",),
        prediction=QWEN_PREDICTION,
        published=("Qwen3-Next",),
        tiny={**TINY, **qwen2_moe.TINY, "norm_topk_prob": True},
    )
)
