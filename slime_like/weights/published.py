"""Weights as the published files of a model have them, where transformers names or orders those of
its class otherwise."""

from __future__ import annotations

from torch import Tensor

from slime_like.weights.families import deepseek_v4
from slime_like.weights.families.kimi_linear import KIMI_LINEAR, published_name

QWEN3_VL_MOE = "Qwen3VLMoeForConditionalGeneration"
KIMI_K25 = "Kimi_K25ForConditionalGeneration"  # transformers' name of the class
GEMMA3 = "Gemma3ForConditionalGeneration"
_PACKED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_KIMI_K25_NAMES = {"model.blocks.": "model.layers.", "model.mm_": "mm_"}


def as_published(class_name: str, name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Published name and a view of a weight that transformers' class has under `name`.

    transformers calls the layers of Kimi-K2.5's text `blocks`, as the tower's are called, and the
    dense layers of Kimi-Linear like those with experts. It has the weights of Qwen3-VL-MoE's
    experts as [experts, out, in] in place of [experts, in, out], unless it has loaded them from
    published files. So it is with a part of the names of Gemma 3's tower.
    """
    if class_name == KIMI_K25:
        for theirs, published in _KIMI_K25_NAMES.items():
            name = name.replace(theirs, published)
    elif class_name == KIMI_LINEAR:
        name = published_name(name)
    elif class_name == deepseek_v4.DEEPSEEK_V4:
        name = deepseek_v4.published_name(name)
    elif class_name == GEMMA3:
        name = with_vision_model(name)
    elif class_name == QWEN3_VL_MOE and name.endswith(_PACKED_EXPERTS):
        weight = weight.transpose(1, 2)
    return name, weight


def with_vision_model(name: str) -> str:
    """Published name of a tensor of Gemma 3, which transformers may save without a part of it."""
    tower, _, rest = name.partition("vision_tower.")
    if tower or not rest or rest.startswith("vision_model."):
        return name
    return f"vision_tower.vision_model.{rest}"
