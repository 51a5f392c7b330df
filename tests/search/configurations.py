"""Random configurations of a family: odd numbers of heads, groups, experts and layers, other norms and
rotary embeddings, tied weights, and files in half precision or in several parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.make_tiny_model import SIZES, rope_of_images
from slime_like.weights.families import ModelFamily

Draw = Callable[[random.Random], Any]
# of what is drawn already, further keys
Draws = Callable[[Mapping[str, Any], random.Random], dict[str, Any]]
VOCABULARY = 101  # of make_tiny_model's tokenizer


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


# by key of config.json: drawn where the family's tiny model has the key
VALUES: dict[str, Draw] = {
    "num_hidden_layers": one_of(2, 3, 4),
    "intermediate_size": one_of(20, 36, 52),
    "tie_word_embeddings": one_of(False, True),
    "attention_bias": one_of(False, True),
    "use_qk_norm": one_of(False, True),
    "moe_intermediate_size": one_of(12, 20, 28),
    "shared_expert_intermediate_size": one_of(8, 20, 40),
    "moe_shared_expert_intermediate_size": one_of(8, 20, 40),
    "n_shared_experts": one_of(1, 3),
    "num_shared_experts": one_of(1, 2),
    "routed_scaling_factor": one_of(0.6, 1.0, 2.5),
    "router_scaling_factor": one_of(0.6, 1.0, 2.5),
    "norm_topk_prob": one_of(False, True),
    "moe_renormalize": one_of(False, True),
    "first_k_dense_replace": one_of(0, 1, 2),
    "decoder_sparse_step": one_of(1, 2),
    "mlp_only_layers": one_of([], [0], [1]),
    "q_lora_rank": one_of(None, 14),
    "kv_lora_rank": one_of(10, 18),
    "qk_nope_head_dim": one_of(6, 14),
    "qk_rope_head_dim": one_of(4, 6, 10),
    "v_head_dim": one_of(7, 12),
    "attention_value_scale": one_of(None, 0.3, 1.7),
    "global_head_dim": one_of(12, 16, 20),
    "attention_k_eq_v": one_of(False, True),
    "final_logit_softcapping": one_of(None, 2.0, 30.0),
    "embedding_multiplier": one_of(0.7, 12.0),
    "attention_multiplier": one_of(0.1, 1.0),
    "residual_multiplier": one_of(0.22, 1.0),
    "logits_scaling": one_of(1.0, 3.0),
    "shared_intermediate_size": one_of(8, 20, 40),
    "position_embedding_type": one_of("rope", "nope"),
    "sliding_window": one_of(3, 5, 9),
    "sliding_window_pattern": one_of(2, 3),
    "query_pre_attn_scalar": one_of(11, 32),
    "swiglu_limit": one_of(0.4, 1.3),
    "full_attention_interval": one_of(2, 3),
    "linear_conv_kernel_dim": one_of(2, 3, 5),
    "linear_key_head_dim": one_of(4, 7),
    "linear_value_head_dim": one_of(3, 8),
    "linear_num_heads": one_of(2, 3),
    "linear_head_dim": one_of(5, 8),
    "mamba_head_dim": one_of(3, 7),
    "ssm_state_size": one_of(3, 6),
    "conv_kernel": one_of(2, 3),
    "mamba_d_state": one_of(3, 6),
    "mamba_d_conv": one_of(2, 4),
    "conv_L_cache": one_of(2, 3, 5),
    "num_dense_layers": one_of(0, 1),
    "block_auto_adjust_ff_dim": one_of(False, True),
    "no_rope_layer_interval": one_of(2, 3),
    "index_topk": one_of(3, 5),
    "index_head_dim": one_of(12, 16),
    "index_n_heads": one_of(12, 15),
    "hc_sinkhorn_iters": one_of(2, 8),
    "share_expert_dim": one_of(8, 20, 40),
    "moe_router_scaling_factor": one_of(0.6, 1.0, 2.5),
    # the last one is for the rest of the layers
    "swiglu_limits": one_of(None, [0.0, 0.2], [0.1, None]),
    "swiglu_limits_shared": one_of(None, [0.2, 0.1], [0.1, 0.0]),
    "mamba_expand": one_of(1, 2, 3),
    "block_multiple_of": one_of(1, 8, 12),
    "block_ffn_dim_multiplier": one_of(0.8, 1.3),
    "hc_count": one_of(2, 3, 5),
    "hc_lowrank": one_of(4, 9),
    "indexer_n_heads": one_of(12, 15),
    "indexer_head_dim": one_of(12, 18),
    "ple_layer_ids": one_of([1], [2], [1, 2]),
    "ple_embed_dim": one_of(12, 24),
    "ple_conv_kernel_size": one_of(2, 4),
    "ngram_size": one_of(2, 3, 4),
    "heads_per_ngram": one_of(1, 2),
    "ngram_vocab_size_base": one_of(5, 37),
    "seed": one_of(6, 9),
}
# of the keys of tiny models, those that are not drawn -> why
KEPT = {
    "max_position_embeddings": "sequences are shorter",
    "initializer_range": "weights of trained models are of any size",
    "attention_dropout": "of training",
    "bos_token_id": "no part of the network",
    "pad_token_id": "no part of the network",
    "num_nextn_predict_layers": "transformers has no such layers",
    "vision_config": "towers are not loaded",
    "model_type": "of the text of a model that sees",
    "n_group": "drawn where there are several groups",
    "topk_group": "drawn where there are several groups",
    "partial_rotary_factor": "drawn within rope_parameters",
    "split_ngram_parts": "of files alone",
    "make_ngram_vocab_size_divisible_by": "of files alone",
    "indexer_kv_heads": "must be 1",
}
# keys that transformers' class of an architecture does not read, does not have, or has with one
# value alone
FIXED: dict[str, tuple[str, ...]] = {
    "Glm4vForConditionalGeneration": ("attention_bias", "head_dim", "rope_parameters"),
    "Glm46VForConditionalGeneration": ("attention_bias", "head_dim", "rope_parameters"),
    "Glm5NextForConditionalGeneration": ("head_dim", "qk_rope_head_dim", "q_lora_rank"),
    "MixtralForCausalLM": ("sliding_window",),
    "SolarOpenForCausalLM": ("first_k_dense_replace",),
    "Glm4vMoeForConditionalGeneration": ("attention_bias", "use_qk_norm"),
    "KimiK25ForConditionalGeneration": ("q_lora_rank",),
    "DeepseekV4ForCausalLM": (
        *("q_lora_rank", "n_shared_experts", "num_key_value_heads", "rope_parameters"),
    ),
}
# key of the norms' epsilon, where it has another name
EPSILONS = {"nemotron_h": "layer_norm_epsilon", "lfm2": "norm_eps", "lfm2_moe": "norm_eps"}
LATENT = "kv_lora_rank"
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token")
GROUPS = ("n_group", "num_expert_group")


@dataclass(frozen=True)
class Configuration:
    """A random model."""

    changes: Mapping[str, Any]  # of config.json
    dtype: str  # of the file: float32, bfloat16 or float16
    parts: int  # files

    def __str__(self) -> str:
        return f"{self.dtype} in {self.parts} files: {dict(self.changes)}"


def random_configuration(
    family: ModelFamily, rng: random.Random, more: Draws | None = None
) -> Configuration:
    """Of every key only values that the architecture has; together they may be refused.

    Args:
        more: Of a model in `FURTHER`.
    """
    tiny = {**SIZES, **family.tiny}
    changes = {key: draw(rng) for key, draw in VALUES.items() if tiny.get(key) is not None}
    if "q_lora_rank" in tiny:
        changes["q_lora_rank"] = VALUES["q_lora_rank"](rng)
    changes |= _attention(tiny, rng) | _experts(tiny, rng)
    for key in FIXED.get(family.architecture, ()):
        if key in VALUES or key == "head_dim":
            changes.pop(key, None)
        if key == "head_dim" and tiny[key]:
            changes["hidden_size"] = changes["num_attention_heads"] * tiny[key]
    # with at least one layer of attention, which transformers' caches need
    changes["num_hidden_layers"] += (
        2 if "mamba_num_heads" in tiny else "full_attention_interval" in tiny
    )
    changes[EPSILONS.get(family.model_type, "rms_norm_eps")] = rng.choice([1e-7, 3e-4, 1e-2])
    if "mamba_d_state" in tiny:
        kinds = ["linear_attention", "full_attention"]
        rest = changes["num_hidden_layers"] - 1
        changes["layer_types"] = ["full_attention", *(rng.choice(kinds) for _ in range(rest))]
    if "compress_rates" in tiny:
        changes |= _compressed(tiny, changes, rng)
    else:
        changes |= _kinds_of_layers(family, tiny, changes, rng)
    if more is not None:
        changes |= more(changes, rng)
    elif "enable_moe_block" in family.keys and rng.random() < 0.5:
        changes |= _beside_mlp(changes, rng)
    if rope := _rope(family, tiny, changes, rng):
        changes["rope_parameters"] = rope
    dtype = rng.choice(["float32", "bfloat16", "float16"])
    return Configuration(changes, dtype, rng.choice([1, 2, 3]))


def _attention(tiny: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Heads in groups of an unusual size; a hidden size that they need not divide where a head has
    its own."""
    groups = rng.choice([1, 2, 3])
    heads = groups * rng.choice([1, 2, 3, 5])
    found: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups}
    if LATENT in tiny:
        return {**found, "num_key_value_heads": heads, "hidden_size": rng.choice([20, 36, 44])}
    if "head_dim" in tiny:
        found |= {"head_dim": rng.choice([8, 12, 20]), "hidden_size": rng.choice([20, 36, 44])}
    else:
        found["hidden_size"] = heads * rng.choice([8, 12])
    if "num_global_key_value_heads" in tiny:
        found["num_global_key_value_heads"] = rng.choice([1, groups, heads])
    if "num_sliding_attention_heads" in tiny:
        found["num_sliding_attention_heads"] = groups * rng.choice([1, 2, 4])
    if "mamba_n_heads" in tiny:
        found["mamba_n_heads"] = rng.choice([2, 4, 6])
    if "rotary_dim" in tiny:
        found["rotary_dim"] = rng.choice([2, 4, found["head_dim"]])
    if "linear_num_key_heads" in tiny:
        keys = rng.choice([1, 2, 3])
        found |= {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        }
    if "mamba_num_heads" in tiny:
        of_state = rng.choice([1, 2, 3])
        found |= {"n_groups": of_state, "mamba_num_heads": of_state * rng.choice([1, 2, 3])}
    return found


def _kinds_of_layers(
    family: ModelFamily, tiny: Mapping[str, Any], changes: Mapping[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Kinds of layers in any order, each at least once, and layers with experts."""
    layers = changes["num_hidden_layers"]
    found: dict[str, Any] = {}
    if (kinds := tiny.get("layer_types")) and "layer_types" not in changes:
        chosen = [*kinds, *(rng.choice(kinds) for _ in range(layers - len(kinds)))]
        rng.shuffle(chosen)
        if "enable_moe_block" in family.keys:  # Gemma 4's last layer has no window
            chosen.remove("full_attention")
            chosen.append("full_attention")
        found["layer_types"] = chosen
    if "mlp_layer_types" in tiny:
        dense = rng.randrange(layers)
        chosen = ["dense"] * dense + ["sparse"] * (layers - dense)
        if "share_expert_dim" in tiny:  # Step's may be in any order
            rng.shuffle(chosen)
        found["mlp_layer_types"] = chosen
    if "index_kpool" in tiny:  # GLM-5.3's
        pool = rng.choice([2, 3])
        found |= {"index_kpool": pool, "index_topk": pool * rng.choice([1, 3])}
        found["hc_mult"] = rng.choice([2, 3, 5])
    if "indexer_budget" in tiny:  # Qwen3.8's
        pool = rng.choice([1, 2, 4])
        found |= {"indexer_compress_ratio": pool, "indexer_budget": pool * rng.choice([2, 3])}
    return found


def _compressed(
    tiny: Mapping[str, Any], changes: Mapping[str, Any], rng: random.Random
) -> dict[str, Any]:
    """DeepSeek-V4's kinds of layers in any order, and groups of its output projection."""
    heads = changes["num_attention_heads"]
    layers = changes["num_hidden_layers"]
    hashed = rng.randint(0, layers)
    sparse, heavy = tiny["compress_rates"]
    return {
        "num_key_value_heads": 1,
        "o_groups": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "o_lora_rank": rng.choice([1, 6, 9]),
        # the last norm takes away what weighs a single stream
        "hc_mult": rng.choice([2, 3, 5]),
        "compress_rates": {sparse: rng.choice([2, 4]), heavy: rng.choice([3, 8, 40])},
        "compress_rope_theta": rng.choice([300.0, 160000.0]),
        "layer_types": [rng.choice(tiny["layer_types"]) for _ in range(layers)],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
    }


def _inputs_of_layers(changes: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Gemma 4 E2B and E4B: the last layers share the keys of two before them, one of each kind."""
    sharing = rng.choice([1, 2, 3])
    kinds = [*changes["layer_types"], "sliding_attention", "full_attention"]
    rest = [rng.choice(kinds) for _ in range(sharing - 1)]
    kinds = [*kinds[-2:], *kinds[:-2], *rest, "full_attention"]
    return {
        **{"num_hidden_layers": len(kinds), "layer_types": kinds, "num_kv_shared_layers": sharing},
        **{
            "use_double_wide_mlp": rng.choice([False, True]),
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "hidden_size_per_layer_input": rng.choice([3, 7, 28]),
        # With 1e-7 a norm of three numbers can make the gradients of transformers' own class move by
        # 3e-11 where its weights move by 1e-15.
        "rms_norm_eps": rng.choice([3e-4, 1e-2]),
    }


def _beside_mlp(changes: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Gemma 4's experts."""
    experts = rng.choice([3, 5, 7])
    return {
        **{"enable_moe_block": True, "num_experts": experts},
        **{"top_k_experts": rng.randint(2, experts - 1), "moe_intermediate_size": 20},
    }


# further models of a family, of which each has its own draws
FURTHER: dict[str, tuple[str, Draws]] = {
    "Gemma 4 E2B": ("Gemma4ForCausalLM", _inputs_of_layers),
    "Gemma 4 E4B": ("Gemma4ForConditionalGeneration", _inputs_of_layers),
    "Gemma 4 26B-A4B": ("Gemma4ForConditionalGeneration", _beside_mlp),
}


def _experts(tiny: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """A number of experts that is no power of two; in groups, of each of which two are taken."""
    name = next((key for key in EXPERTS if key in tiny), None)
    if name is None:
        return {}
    chosen = next(key for key in CHOSEN if key in tiny)
    groups = next((key for key in GROUPS if tiny.get(key, 1) > 1), None)
    if groups is None:
        experts = rng.choice([3, 5, 6, 7])
        return {name: experts, chosen: rng.randint(2, experts - 1)}
    count, taken = rng.choice([(2, 1), (3, 2), (4, 3), (4, 2)])
    return {
        name: count * rng.choice([2, 3]), groups: count, "topk_group": taken, chosen: 2 * taken,
    }  # fmt: skip


def _rope(
    family: ModelFamily, tiny: Mapping[str, Any], changes: Mapping[str, Any], rng: random.Random
) -> dict[str, Any] | None:
    """Another base, part of the head or scaling; None for what it has already."""
    theta = rng.choice([300.0, 20000.0, 5e6])
    given = tiny.get("rope_parameters")
    if not family.rotary:
        return None
    if "mrope_section" in (given or {}):
        return rope_of_images(family, {**tiny, **changes})
    if family.text_config and given is None:
        return None
    if given and "full_attention" in given:
        drawn = {
            kind: {**own, "rope_theta": rng.choice([300.0, 5e6])} for kind, own in given.items()
        }
        if "num_sliding_attention_heads" in tiny:  # Step's, with a share for each kind
            for own in drawn.values():
                own["partial_rotary_factor"] = rng.choice([0.5, 1.0])
        return drawn
    rope = {**(given or {"rope_type": "default"}), "rope_theta": theta}
    if "partial_rotary_factor" in rope or (family.rotary_percent and "rotary_dim" not in tiny):
        rope["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    elif given is None and LATENT not in tiny:
        rope |= rng.choice(SCALINGS)
    return rope


YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}
SCALINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"rope_type": "linear", "factor": 2.5},
    YARN,
    {**YARN, "attention_factor": 1.4, "beta_fast": 16.0, "truncate": False},
    {
        "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
        "original_max_position_embeddings": 24,
    },
)  # fmt: skip
