"""Weights as the published files of a model have them, where transformers names or orders those of
its class otherwise."""

from __future__ import annotations

from torch import Tensor

from slime_like.weights.families.kimi_linear import KIMI_LINEAR, published_name

QWEN3_VL_MOE = "Qwen3VLMoeForConditionalGeneration"
KIMI_K25 = "Kimi_K25ForConditionalGeneration"  # transformers' name of the class
_PACKED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_KIMI_K25_NAMES = {"model.blocks.": "model.layers.", "model.mm_": "mm_"}


def as_published(class_name: str, name: str, weight: Tensor) -> tuple[str, Tensor]:
    """Published name and a view of a weight that transformers' class has under `name`.

    transformers calls the layers of Kimi-K2.5's text `blocks`, as the tower's are called, and the
    dense layers of Kimi-Linear like those with experts. It has the weights of Qwen3-VL-MoE's
    experts as [experts, out, in] in place of [experts, in, out], unless it has loaded them from
    published files.
    """
    if class_name == KIMI_K25:
        for theirs, published in _KIMI_K25_NAMES.items():
            name = name.replace(theirs, published)
    elif class_name == KIMI_LINEAR:
        name = published_name(name)
    elif class_name == QWEN3_VL_MOE and name.endswith(_PACKED_EXPERTS):
        weight = weight.transpose(1, 2)
    return name, weight
