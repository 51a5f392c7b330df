"""gpt-oss: MoE in every layer, biases in all projections and the router, sliding windows in every
other layer, learned attention sinks, and a clamped gated unit with quick GELU and an offset of 1.
The published files store the experts in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from typing import Any

from slime_like.weights.families import qwen2
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    HF_MLP,
    MLP,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.experts import EXPERT, ExpertKeys, expert_settings
from slime_like.weights.mappings import HeadParallel, Mapping, Replicated, ReplicatedRows
from slime_like.weights.stacked_experts import StackedDown, StackedDownBias, StackedGateUp

PARAMETERS: dict[str, Mapping] = {
    **{name: m for name, m in qwen2.PARAMETERS.items() if not name.startswith(MLP)},
    f"{ATTENTION}.linear_proj.bias": Replicated(f"{HF_ATTENTION}.o_proj.bias"),
    f"{ATTENTION}.core_attention.softmax_offset": HeadParallel(f"{HF_ATTENTION}.sinks"),
    f"{MLP}.router.weight": ReplicatedRows(f"{HF_MLP}.router.weight", "experts"),
    f"{MLP}.router.bias": Replicated(f"{HF_MLP}.router.bias", "experts"),
    f"{EXPERT}.linear_fc1.weight": StackedGateUp(f"{HF_MLP}.experts.gate_up_proj"),
    f"{EXPERT}.linear_fc1.bias": StackedGateUp(f"{HF_MLP}.experts.gate_up_proj_bias", bias=True),
    f"{EXPERT}.linear_fc2.weight": StackedDown(f"{HF_MLP}.experts.down_proj"),
    f"{EXPERT}.linear_fc2.bias": StackedDownBias(f"{HF_MLP}.experts.down_proj_bias"),
}
EXPERTS = ExpertKeys(experts=("num_local_experts",), ffn="intermediate_size")
ALPHA = 1.702  # of megatron-core's quick GELU, x * sigmoid(1.702 x)
# published files have `experts_per_token` and `initial_context_length` as duplicates of keys that
# they also contain
KEYS = {"attention_bias", "swiglu_limit", "swiglu_alpha"}
RESTATED = {"experts_per_token", "initial_context_length"}
ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}


def _settings(reader: ConfigReader) -> dict[str, object]:
    if reader.config.get("attention_bias") is False:
        reader.refuse("attention_bias false is not supported with this architecture")
    require_values(reader, {"swiglu_alpha": ALPHA})
    return {
        **expert_settings(reader, EXPERTS),
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": reader.number("swiglu_limit", default=7.0, whole=False),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


def _rope(config: MappingOf[str, Any]) -> MappingOf[str, object]:
    """The rotary embedding of a file without rope_parameters and rope_scaling, as in
    transformers."""
    return {} if config.get("rope_scaling") else {"rope_parameters": ROPE}


def _every_other_layer(reader: ConfigReader) -> list[bool]:
    return [layer % 2 == 0 for layer in range(reader.number("num_hidden_layers"))]


register_model_family(
    ModelFamily(
        "GptOssForCausalLM",
        "gpt_oss",
        PARAMETERS,
        required=("num_key_value_heads", "num_experts_per_tok", "num_local_experts", "head_dim"),
        keys=EXPERTS.keys | KEYS | RESTATED,
        qkv_bias=True,
        settings=_settings,
        windows=_every_other_layer,
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "sliding_window": 128},
        },
        derived=_rope,
        layer_types=WINDOWS,
        rope_theta=150000.0,
        published=("gpt-oss",),
        tiny={
            **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"sliding_window": 6, "swiglu_limit": 0.6},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16},
            },
        },
    )
)
