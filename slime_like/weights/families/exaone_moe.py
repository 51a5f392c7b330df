"""K-EXAONE: Qwen3's attention, windows in three of four layers and no rotary embedding in the
others, DeepSeek-V3's experts, dense first layers."""

from __future__ import annotations

from slime_like.weights.families import exaone4, qwen3
from slime_like.weights.families.base import (
    HF_MLP,
    MLP,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
)
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    sigmoid_experts,
)
from slime_like.weights.mappings import Mapping, Replicated

PARAMETERS: dict[str, Mapping] = {
    **qwen3.PARAMETERS,
    **EXPERT_PARAMETERS,
    f"{MLP}.router.expert_bias": Replicated(f"{HF_MLP}.e_score_correction_bias", "experts"),
}
# this family's name -> DeepSeek-V3's
NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {**sigmoid_experts(reader), **exaone4.rotated_in_windows(reader)}


register_model_family(
    ModelFamily(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        PARAMETERS,
        required=("num_key_value_heads", *EXPERTS_REQUIRED),
        keys=EXPERT_KEYS | set(NAMES.values()) | {"sliding_window_pattern"},
        qk_norm=True,
        settings=_settings,
        stand_ins=NAMES,
        windows=exaone4.windows,
        defaults={
            **{**exaone4.DEFAULTS, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        },
        layer_types=WINDOWS,
        published=("K-EXAONE",),
        tiny={
            **{"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4},
            **{"num_experts_per_tok": 2, "num_shared_experts": 1, "routed_scaling_factor": 1.7},
            **{"sliding_window": 6, "sliding_window_pattern": 2, "first_k_dense_replace": 1},
        },
    )
)
