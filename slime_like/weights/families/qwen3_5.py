"""Qwen3.5 and 3.6, dense and MoE: Qwen3-Next's layers, with separate input projections of the delta
nets. The published files also have a vision tower, which is not loaded; the language model's keys
are in `text_config`. For text, the three axes of the rotary embedding have equal positions, so it
is a plain one.
"""

from __future__ import annotations

import dataclasses

from slime_like.images.settings import RotaryAxes
from slime_like.weights import mappings
from slime_like.weights.families import qwen2_moe, qwen3_moe, shells
from slime_like.weights.families.base import (
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
)
from slime_like.weights.families.delta_net import (
    HF_DELTA,
    KEYS,
    LAYER_TYPES,
    REQUIRED,
    TINY,
    DeltaProjections,
    delta_parameters,
    delta_settings,
    quarter_rotary,
)
from slime_like.weights.families.experts import expert_settings
from slime_like.weights.families.prediction import QWEN_PREDICTION

DENSE: dict[str, mappings.Mapping] = delta_parameters(
    DeltaProjections(*(f"{HF_DELTA}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
)
SPARSE: dict[str, mappings.Mapping] = {
    **DENSE,
    **{name: m for name, m in qwen2_moe.PARAMETERS.items() if name.startswith(MLP)},
}
EXPERTS = dataclasses.replace(
    qwen3_moe.EXPERTS,
    norm_topk=("norm_topk_prob", True),
    dense_layers=False,
    shared=qwen2_moe.SHARED_FFN,
)
PREDICTION_KEYS = {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}


def _settings(reader: ConfigReader) -> dict[str, object]:
    gate = reader.config.get("output_gate_type")
    if gate not in (None, "swish", "silu"):
        reader.refuse(
            f"output_gate_type {gate!r} is not supported with this architecture, of which "
            "transformers' class computes silu whatever the key says; legal values: swish, silu"
        )
    return delta_settings(reader)


def _prediction_layers(reader: ConfigReader) -> int:
    return int(reader.config.get("mtp_num_hidden_layers") or 0)


AXES = RotaryAxes((11, 11, 10), interleaved=True)
TEXT = ModelFamily(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    DENSE,
    required=REQUIRED,
    keys=KEYS | PREDICTION_KEYS | {"output_gate_type"} | shells.KEYS,
    defaults={"max_position_embeddings": 32768},
    qk_norm=True,
    rotary_percent=quarter_rotary,
    settings=_settings,
    layer_types=LAYER_TYPES,
    untrained_prefixes=("mtp.", "model.visual."),
    prediction=dataclasses.replace(QWEN_PREDICTION, count=_prediction_layers),
    tiny=TINY,
    vision="is a language model alone",
)
SPARSE_TEXT = dataclasses.replace(
    TEXT,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    parameters=SPARSE,
    required=(*REQUIRED, "num_experts_per_tok", "moe_intermediate_size", qwen2_moe.SHARED_FFN),
    keys=TEXT.keys | EXPERTS.keys,
    settings=lambda reader: _settings(reader) | expert_settings(reader, EXPERTS),
    stand_ins={"intermediate_size": "moe_intermediate_size"},  # no layer is dense
    tiny={**TINY, **qwen2_moe.TINY},
)
register_model_family(TEXT)
register_model_family(SPARSE_TEXT)
for family, architecture, model_type, published in (
    (TEXT, "Qwen3_5ForConditionalGeneration", "qwen3_5", ("Qwen3.5", "Qwen3.6")),
    (
        SPARSE_TEXT,
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        ("Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B"),
    ),
):
    register_model_family(
        dataclasses.replace(
            family,
            architecture=architecture,
            model_type=model_type,
            parameters=shells.renamed(family.parameters, shells.IN_MODEL),
            prediction=dataclasses.replace(
                QWEN_PREDICTION,
                count=_prediction_layers,
                layers="model.language_model.layers.{layer}",
            ),
            text_config=(family.model_type,),
            published=published,
            vision=shells.qwen_tower(AXES),
            tiny={**family.tiny, "vision_config": shells.QWEN_TOWER},
        )
    )
