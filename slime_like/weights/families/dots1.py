"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts."""

from __future__ import annotations

from slime_like.weights.families import qwen3
from slime_like.weights.families.base import (
    WINDOWS,
    ModelFamily,
    after_max_window_layers,
    register_model_family,
)
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    TINY,
    sigmoid_experts,
)

register_model_family(
    ModelFamily(
        "Dots1ForCausalLM",
        "dots1",
        {**qwen3.PARAMETERS, **EXPERT_PARAMETERS},
        required=("num_key_value_heads", *EXPERTS_REQUIRED),
        keys=EXPERT_KEYS,
        qk_norm=True,
        settings=sigmoid_experts,
        windows=after_max_window_layers,
        defaults={"max_window_layers": 62},
        layer_types=WINDOWS,
        published=("dots.llm1",),
        tiny={**TINY, "head_dim": 16},
    )
)
