"""MiMo-7B: Qwen2 with a multi-token prediction layer. transformers has no class for it; the model's
folder contains one."""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import qwen2
from slime_like.weights.families.base import register_model_family
from slime_like.weights.families.prediction import MIMO_PREDICTION

register_model_family(
    dataclasses.replace(
        qwen2.QWEN2,
        architecture="MiMoForCausalLM",
        model_type="mimo",
        keys=frozenset({"attention_bias", "num_nextn_predict_layers"}),
        untrained_prefixes=("model.mtp_layers.",),
        prediction=MIMO_PREDICTION,
        published=("MiMo-7B",),
        same_as="qwen2",
        tiny={"attention_bias": True},
    )
)
