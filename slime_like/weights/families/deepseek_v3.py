"""DeepSeek-V3, Kimi-K2, Moonlight and GLM-4.7-Flash: multi-latent attention, group-limited sigmoid
routing.

Settings without a counterpart in megatron-core 0.16 are rejected: group scores other than the sum
of each group's two best, weights that are not renormalised, rotary embeddings by halves.
"""

from __future__ import annotations

import dataclasses

from slime_like.weights.families import llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.prediction import DEEPSEEK_PREDICTION
from slime_like.weights.families.sigmoid_experts import (
    EXPERT_KEYS,
    EXPERT_PARAMETERS,
    EXPERTS_REQUIRED,
    TINY,
    sigmoid_experts,
    untrained_layers,
)
from slime_like.weights.mappings import ColumnParallel, Mapping, Replicated, RowParallel

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
KEYS = EXPERT_KEYS | {*MLA_KEYS, "rope_interleave", "qk_head_dim", "ep_size", "seq_aux"}
REQUIRED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    *EXPERTS_REQUIRED,
)
# key -> transformers' default
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def deepseek_settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of MLATransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, {"rope_interleave": True})
    heads = reader.number("num_attention_heads")
    groups = reader.number("num_key_value_heads", default=heads)
    if groups != heads:
        reader.refuse(
            f"num_key_value_heads {groups} must be num_attention_heads {heads}: latent attention "
            "has no groups"
        )
    q_lora_rank = None
    if reader.config.get("q_lora_rank") is not None:
        q_lora_rank = reader.number("q_lora_rank")
    key_dim = reader.number("qk_nope_head_dim")
    rope_dim = 0  # of GLM-5.3
    if reader.config.get("qk_rope_head_dim") is not None:
        rope_dim = reader.number("qk_rope_head_dim")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": reader.number("kv_lora_rank"),
        "qk_head_dim": key_dim,
        "qk_pos_emb_head_dim": rope_dim,
        "v_head_dim": reader.number("v_head_dim"),
        "kv_channels": rope_dim or key_dim,  # config.json's head_dim
        "qk_layernorm": True,  # norms of the latents
        **_rotary(reader),
        **sigmoid_experts(reader),
    }


def _rotary(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    base = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if not isinstance(base, int | float):
        reader.refuse(f"rope_theta must be a positive number, not {base!r:.200}")
        base = 10000.0
    settings: dict[str, object] = {
        "rope_type": "rope",
        "rotary_base": float(base),
        "rotary_percent": 1.0,
    }
    if kind != "yarn":
        if kind != "default":
            reader.refuse(
                f"rope_type {kind!r} is not supported with latent attention; legal values: "
                "default, yarn"
            )
        return settings | {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    yarn = {key: rope.pop(key, default) for key, default in YARN.items()}
    factor = rope.pop("factor", None)
    positions = rope.pop("original_max_position_embeddings", None)
    for key, value in (("factor", factor), ("original_max_position_embeddings", positions)):
        if not isinstance(value, int | float):
            reader.refuse(f"rope_type 'yarn' needs {key}, a number, not {value!r}")
    settings |= {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(factor or 1),
        "original_max_position_embeddings": int(positions or 1),
    }
    if not yarn["mscale"] or not yarn["mscale_all_dim"]:
        reader.refuse("rope_type 'yarn' without mscale and mscale_all_dim is not supported")
    for key, value in sorted(rope.items()):
        reader.refuse(f"rope_type 'yarn' with {key} {value!r} is not supported")
    return settings | {key: float(value) for key, value in yarn.items()}


# megatron-core itself converts the rotated dimensions of queries and keys from interleaved pairs
# to halves, like the reference model
PARAMETERS: dict[str, Mapping] = {
    **{
        name: mapping
        for name, mapping in llama.PARAMETERS.items()
        if ".self_attention." not in name
    },
    f"{ATTENTION}.linear_q_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_proj.weight", "latent_query"
    ),
    f"{ATTENTION}.linear_q_down_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_a_proj.weight", "q_latent"
    ),
    f"{ATTENTION}.q_layernorm.weight": Replicated(
        f"{HF_ATTENTION}.q_a_layernorm.weight", "q_latent"
    ),
    f"{ATTENTION}.linear_q_up_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.q_b_proj.weight", "latent_query", "q_latent"
    ),
    f"{ATTENTION}.linear_kv_down_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.kv_a_proj_with_mqa.weight", "kv_latent_and_rotary"
    ),
    f"{ATTENTION}.kv_layernorm.weight": Replicated(
        f"{HF_ATTENTION}.kv_a_layernorm.weight", "kv_latent"
    ),
    f"{ATTENTION}.linear_kv_up_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.kv_b_proj.weight", "latent_key_value", "kv_latent"
    ),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{HF_ATTENTION}.o_proj.weight", "latent_value"),
    **EXPERT_PARAMETERS,
}

DEEPSEEK_V3 = ModelFamily(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    PARAMETERS,
    required=REQUIRED,
    keys=KEYS,
    settings=deepseek_settings,
    defaults={
        **{"max_position_embeddings": 4096, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    },
    # transformers 5 derives it, and does not save it (GLM-4.7-Flash: 2048 channels, 20 heads)
    stand_ins={"head_dim": "qk_rope_head_dim"},
    other_model_types=("kimi_k2",),
    untrained_layers=untrained_layers,
    prediction=DEEPSEEK_PREDICTION,
    published=("DeepSeek-V3", "DeepSeek-R1", "Kimi-K2", "Moonlight"),
    tiny={
        **TINY,
        **{"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
        **{"n_group": 4, "topk_group": 2},
    },
)
register_model_family(DEEPSEEK_V3)
register_model_family(
    dataclasses.replace(
        DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        other_model_types=(),
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "q_lora_rank": 768},
            **{"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
        },
        published=("GLM-4.7-Flash",),
        tiny={**DEEPSEEK_V3.tiny, "n_group": 1, "topk_group": 1},
    )
)
