"""The text of models with a vision tower: a known language model under other names. The tower's
tensors are not loaded; exports and engines get them as they are in the files. For text the axes of
multi-axis rotary embeddings have equal positions, so they are plain ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from slime_like.images.settings import RotaryAxes, VisionFamily
from slime_like.weights import mappings
from slime_like.weights.families import (  # noqa: F401  (each registers the text's family)
    deepseek_v3,
    exaone4,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from slime_like.weights.families.base import (
    HF_MLP,
    ConfigReader,
    ModelFamily,
    model_families,
    register_model_family,
)
from slime_like.weights.families.experts import EXPERT, expert_settings
from slime_like.weights.stacked_experts import StackedDown, StackedGateUpHalves

# prefixes of names: of the text's own class -> of the file
IN_MODEL = {"model.": "model.language_model."}
BESIDE_TOWER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
TOWER_AND_PROJECTOR = ("vision_tower.", "multi_modal_projector.")
KEYS = frozenset(
    {
        "vision_config",
        "language_model_only",
        "image_token_id",
        "image_token_index",
        "image_start_token_id",
        "image_end_token_id",
        "video_token_id",
        "video_start_token_id",
        "video_end_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "boi_token_index",
        "eoi_token_index",
        "mm_tokens_per_image",
        "spatial_merge_size",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "projector_hidden_act",
    }
)
KIMI_KEYS = frozenset(
    {
        "media_placeholder_token_id",
        "ignore_index",
        "use_unified_vision_chunk",
        "video_placeholder",
        "projection_hidden_size",
        "projection_layer_norm_eps",
        "projection_hidden_act",
        "mm_hidden_size",
    }
)
GEMMA4_KEYS = frozenset(
    {
        *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        *("boi_token_id", "eoi_token_id", "vision_soft_tokens_per_image"),
    }
)
# settings of a tiny tower of Qwen's
QWEN_TOWER = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "in_channels": 1},
    **{"patch_size": 2, "spatial_merge_size": 1, "temporal_patch_size": 1},
    **{"out_hidden_size": 32, "num_position_embeddings": 4},
}
TOWER = {
    **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
    **{"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
}
THREE_AXES = {
    **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "mrope_section": [1, 1, 2],
}


# axes in blocks, whose sizes the files have; and interleaved ones, with transformers' default
BLOCKS = RotaryAxes()
INTERLEAVED = RotaryAxes((24, 20, 20), interleaved=True)


def qwen_tower(
    axes: RotaryAxes | None, prefix: str = "model.visual.", deepstack: str | None = None
) -> VisionFamily:
    """prefix: of its tensors in the file."""
    return VisionFamily((("visual", prefix),), axes=axes, deepstack=deepstack)


def _unused_keys_in_shell(reader: ConfigReader) -> tuple[str, ...]:
    (old, new), *_ = IN_MODEL.items()
    return tuple(name.replace(old, new, 1) for name in gemma4.unused_keys(reader))


def shell(
    text: ModelFamily,
    architecture: str,
    model_type: str,
    text_types: tuple[str, ...],
    prefixes: Mapping[str, str],
    tower: tuple[str, ...],
    published: tuple[str, ...],
    tiny_tower: Mapping[str, object],
    tiny: Mapping[str, object] | None = None,
    *,
    vision: VisionFamily | str,
) -> ModelFamily:
    """The family of a model whose `text_config` is of the family `text`.

    Args:
        text_types: Legal model types of `text_config`.
        prefixes: Of names of the text's weights -> those in the file.
        tower: Prefixes of other weights.
        tiny_tower, tiny: `vision_config` and other keys of a tiny model.
        vision: See `ModelFamily`.
    """
    return dataclasses.replace(
        text,
        architecture=architecture,
        model_type=model_type,
        parameters=renamed(text.parameters, prefixes),
        keys=text.keys | KEYS,
        text_config=text_types,
        other_model_types=(),
        same_as=None,
        untrained_prefixes=(*text.untrained_prefixes, *tower),
        published=published,
        prediction=None,
        tiny={**text.tiny, **(tiny or {}), "vision_config": tiny_tower},
        vision=vision,
    )


def renamed(
    parameters: Mapping[str, mappings.Mapping], prefixes: Mapping[str, str]
) -> dict[str, mappings.Mapping]:
    """The mappings with other prefixes of the names in the file."""
    result = {}
    for name, mapping in parameters.items():
        for old, new in prefixes.items():
            mapping = mappings.rename_prefix(mapping, old, new)
        result[name] = mapping
    return result


_QWEN3_MOE = model_families.get("Qwen3MoeForCausalLM")
_VL_EXPERTS: dict[str, mappings.Mapping] = {
    f"{EXPERT}.linear_fc1.weight": StackedGateUpHalves(f"{HF_MLP}.experts.gate_up_proj"),
    f"{EXPERT}.linear_fc2.weight": StackedDown(f"{HF_MLP}.experts.down_proj"),
}
# there is no such key: the weights of the selected experts are always renormalised
_VL_EXPERT_KEYS = dataclasses.replace(qwen3_moe.EXPERTS, norm_topk=("norm_topk_prob", True))


def _vl_experts(reader: ConfigReader) -> dict[str, object]:
    if reader.config.get("norm_topk_prob") is False:
        reader.refuse(
            "norm_topk_prob false is not supported: the weights of this model's selected experts "
            "are always renormalised"
        )
    return expert_settings(reader, _VL_EXPERT_KEYS)


# what the published files of Gemma 3 leave out: transformers' defaults
_GEMMA3 = {
    **gemma3.DEFAULTS,
    **{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
_QWEN_VL = {  # of Qwen2-VL and Qwen2.5-VL
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "max_window_layers": 80},
}
_QWEN3_VL = {"max_position_embeddings": 128000}
_GLM4V = {"max_position_embeddings": 32768}
_DEEPSEEK = model_families.get("DeepseekV3ForCausalLM")

for _family in (
    shell(
        dataclasses.replace(
            model_families.get("Qwen3ForCausalLM"), rope_theta=500000.0, defaults=_QWEN3_VL
        ),
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        ("qwen3_vl_text",),
        IN_MODEL,
        ("model.visual.",),
        ("Qwen3-VL",),
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        vision=qwen_tower(INTERLEAVED, deepstack="deepstack_visual_indexes"),
    ),
    shell(
        dataclasses.replace(
            _QWEN3_MOE,
            parameters={**_QWEN3_MOE.parameters, **_VL_EXPERTS},
            settings=_vl_experts,
            rope_theta=500000.0,
            defaults=_QWEN3_VL,
        ),
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        ("qwen3_vl_moe_text",),
        IN_MODEL,
        ("model.visual.",),
        ("Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B"),
        {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
        vision=qwen_tower(INTERLEAVED, deepstack="deepstack_visual_indexes"),
    ),
    shell(
        dataclasses.replace(
            model_families.get("Qwen2ForCausalLM"), rope_theta=1e6, defaults=_QWEN_VL
        ),
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        ("qwen2_5_vl_text",),
        {},
        ("visual.",),
        ("Qwen2.5-VL",),
        {**QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 8},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [1, 1, 2],
            }
        },
        vision=qwen_tower(BLOCKS, "visual."),
    ),
    shell(
        dataclasses.replace(
            model_families.get("Qwen2ForCausalLM"), rope_theta=1e6, defaults=_QWEN_VL
        ),
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        ("qwen2_vl_text",),
        {},
        ("visual.",),
        ("Qwen2-VL", "QVQ-"),
        {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        {"rope_parameters": {**THREE_AXES, "rope_theta": 1e6, "partial_rotary_factor": 1.0}},
        vision=qwen_tower(BLOCKS, "visual."),
    ),
    shell(
        dataclasses.replace(model_families.get("Gemma3ForCausalLM"), defaults=_GEMMA3),
        "Gemma3ForConditionalGeneration",
        "gemma3",
        ("gemma3_text",),
        BESIDE_TOWER,
        TOWER_AND_PROJECTOR,
        ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
        TOWER,
        vision=VisionFamily(
            (
                ("vision_tower", "vision_tower.vision_model."),
                ("multi_modal_projector", "multi_modal_projector."),
            ),
            image_token="image_token_index",
            features="mm_tokens_per_image",
            both_directions=True,
        ),
    ),
    shell(
        dataclasses.replace(
            gemma4.GEMMA4,
            keys=gemma4.GEMMA4.keys | GEMMA4_KEYS,
            unused_weights=_unused_keys_in_shell,
        ),
        "Gemma4ForConditionalGeneration",
        "gemma4",
        ("gemma4_text",),
        IN_MODEL,
        ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
        ("gemma-4-31B", "gemma-4-26B", "gemma-4-E2B", "gemma-4-E4B"),
        {
            **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 8},
        },
        {"pad_token_id": 0},  # which transformers' class needs
        vision="is offered here without images",
    ),
    shell(
        model_families.get("MistralForCausalLM"),
        "Mistral3ForConditionalGeneration",
        "mistral3",
        ("mistral",),
        BESIDE_TOWER,
        TOWER_AND_PROJECTOR,
        ("Mistral-Small-3", "Magistral-Small", "Devstral-Small"),
        TOWER,
        vision="needs breaks between the rows of an image's placeholders, which are not offered",
    ),
    shell(
        dataclasses.replace(model_families.get("Glm4ForCausalLM"), defaults=_GLM4V),
        "Glm4vForConditionalGeneration",
        "glm4v",
        ("glm4v_text",),
        IN_MODEL,
        ("model.visual.",),
        ("GLM-4.1V",),
        {**QWEN_TOWER, "image_size": 8, "out_hidden_size": 64},
        {"hidden_size": 64, "head_dim": 16, "rope_parameters": THREE_AXES},
        vision=qwen_tower(BLOCKS),
    ),
    shell(
        dataclasses.replace(model_families.get("Glm4ForCausalLM"), defaults=_GLM4V),
        "Glm46VForConditionalGeneration",
        "glm46v",
        ("glm4v_text",),
        IN_MODEL,
        ("model.visual.",),
        ("GLM-4.6V-Flash",),
        {**QWEN_TOWER, "image_size": 8, "out_hidden_size": 64},
        {"hidden_size": 64, "head_dim": 16, "rope_parameters": THREE_AXES},
        vision=qwen_tower(BLOCKS),
    ),
    shell(
        model_families.get("Exaone4ForCausalLM"),
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        ("exaone4",),
        IN_MODEL,
        ("model.visual.",),
        ("EXAONE-4.5",),
        {**QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 8, "num_key_value_heads": 2},
        {"model_type": "exaone4"},
        vision=qwen_tower(None),
    ),
    shell(
        dataclasses.replace(
            model_families.get("Glm4MoeForCausalLM"),
            defaults={
                **{**glm4_moe.DEFAULTS, "max_position_embeddings": 65536},
                **{"use_qk_norm": False, "attention_bias": True},
            },
        ),
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        ("glm4v_moe_text",),
        IN_MODEL,
        ("model.visual.",),
        ("GLM-4.5V", "GLM-4.6V"),
        {**QWEN_TOWER, "image_size": 8},
        {"use_qk_norm": False, "rope_parameters": THREE_AXES},
        vision=qwen_tower(BLOCKS),
    ),
    dataclasses.replace(
        shell(
            dataclasses.replace(_DEEPSEEK, keys=_DEEPSEEK.keys | KIMI_KEYS),
            "KimiK25ForConditionalGeneration",
            "kimi_k25",
            ("deepseek_v3", "kimi_k2"),
            BESIDE_TOWER,
            ("vision_tower.", "mm_projector."),
            ("Kimi-K2.5", "Kimi-K2.6"),
            TOWER,
            vision="needs an image processor of transformers for Pillow, of which it has none",
        ),
        same_as="kimi_k25",  # transformers calls the class Kimi_K25ForConditionalGeneration
    ),
):
    register_model_family(_family)
