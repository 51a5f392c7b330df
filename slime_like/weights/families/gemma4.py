"""Gemma 4, dense, with inputs of layers and keys that layers share (E2B and E4B), or with experts
beside the MLP: Gemma 3's norms with plain weights, windows and scaled embeddings; layers without a
window have larger heads, fewer of them with keys, which are their values too, and turn the fastest
quarter of their pairs. Values are normalised, logits have a cap, and the output of a layer is
multiplied by a number of the file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime_like.weights.attention_sizes import lending_layers
from slime_like.weights.families import gemma3, llama
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
    window_theta,
)
from slime_like.weights.families.experts import EXPERT, shared_expert_parameters
from slime_like.weights.layer_sizes import (
    SizedDown,
    SizedHeadNorm,
    SizedMLP,
    SizedOutput,
    SizedQKV,
)
from slime_like.weights.mappings import (
    Mapping,
    Replicated,
    ReplicatedMatrix,
    ReplicatedRows,
    VocabParallel,
)
from slime_like.weights.stacked_experts import DownRows, GateUpRows

LAYER = "decoder.layers.{layer}"
PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.linear_qkv.weight": SizedQKV(
        f"{HF_ATTENTION}.q_proj.weight",
        f"{HF_ATTENTION}.k_proj.weight",
        f"{HF_ATTENTION}.v_proj.weight",
    ),
    f"{ATTENTION}.linear_proj.weight": SizedOutput(f"{HF_ATTENTION}.o_proj.weight", "query"),
    f"{ATTENTION}.q_layernorm.weight": SizedHeadNorm(f"{HF_ATTENTION}.q_norm.weight", "head_dim"),
    f"{ATTENTION}.k_layernorm.weight": SizedHeadNorm(f"{HF_ATTENTION}.k_norm.weight", "head_dim"),
    **{
        f"{LAYER}.{name}.weight": Replicated(f"model.layers.{{layer}}.{hf_name}.weight")
        for name, hf_name in gemma3.NORMS.items()
    },
    f"{LAYER}.layer_scalar": Replicated("model.layers.{layer}.layer_scalar", "one"),
    f"{MLP}.linear_fc1.weight": SizedMLP(f"{HF_MLP}.gate_proj.weight", f"{HF_MLP}.up_proj.weight"),
    f"{MLP}.linear_fc2.weight": SizedDown(f"{HF_MLP}.down_proj.weight", "ffn"),
    # with inputs of layers (megatron/model/layer_inputs.py)
    "layer_inputs.table.weight": VocabParallel(
        "model.embed_tokens_per_layer.weight", "layer_inputs"
    ),
    "layer_inputs.projection_weight": ReplicatedMatrix(
        "model.per_layer_model_projection.weight", "layer_inputs"
    ),
    "layer_inputs.norm_weight": Replicated("model.per_layer_projection_norm.weight", "layer_input"),
    f"{LAYER}.layer_input.gate_weight": ReplicatedMatrix(
        "model.layers.{layer}.per_layer_input_gate.weight", "layer_input"
    ),
    f"{LAYER}.layer_input.projection_weight": ReplicatedMatrix(
        "model.layers.{layer}.per_layer_projection.weight", "hidden", "layer_input"
    ),
    f"{LAYER}.layer_input.norm_weight": Replicated(
        "model.layers.{layer}.post_per_layer_input_norm.weight"
    ),
    # with experts (megatron/model/beside_mlp.py)
    **{
        f"{MLP}.expert_norms.{name}.weight": Replicated(
            f"model.layers.{{layer}}.{hf_name}_feedforward_layernorm{number}.weight"
        )
        for name, hf_name, number in (
            ("shared_input", "pre", ""),
            ("shared_output", "post", "_1"),
            ("routed_input", "pre", "_2"),
            ("routed_output", "post", "_2"),
        )
    },
    f"{MLP}.router.input_scale": Replicated("model.layers.{layer}.router.scale"),
    f"{MLP}.router.expert_scale": Replicated(
        "model.layers.{layer}.router.per_expert_scale", "experts"
    ),
    f"{MLP}.router.weight": ReplicatedRows("model.layers.{layer}.router.proj.weight", "experts"),
    f"{EXPERT}.linear_fc1.weight": GateUpRows("model.layers.{layer}.experts.gate_up_proj"),
    f"{EXPERT}.linear_fc2.weight": DownRows("model.layers.{layer}.experts.down_proj"),
    **shared_expert_parameters(HF_MLP),
}
OF_LAYERS = "per_layer_config"  # transformers' key, by number of the layer
# key of a layer in it -> the published files' key of all layers without a window
OF_FULL_LAYERS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
GLOBAL_HEAD_DIM = 512  # transformers' default
SHARE = "proportional_rotary_factor"  # our key for the rotary share of layers without a window
SHARED_KEYS = "num_kv_shared_layers"
# what files of Google's have in layers that share keys, which transformers ignores
UNUSED = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
PER_LAYER = "hidden_size_per_layer_input"
PER_LAYER_SIZE = 256  # transformers' default
EXPERTS = {"enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"}
KEYS = EXPERTS | {
    *("hidden_activation", "final_logit_softcapping", "attention_k_eq_v", SHARE, OF_LAYERS),
    *(*OF_FULL_LAYERS.values(), SHARED_KEYS, PER_LAYER, "vocab_size_per_layer_input"),
    *("use_double_wide_mlp", "use_bidirectional_attention"),
}


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of layers without a window under the published files' keys, and their rotary embedding
    as a plain one with a share."""
    config = dict(config)
    # its absence is not 0
    config[PER_LAYER] = config.get(PER_LAYER, PER_LAYER_SIZE) or 0
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention") or {"rope_theta": 1e6, "rope_type": "proportional"}
    if full.get("rope_type") == "proportional":
        config[SHARE] = full.get("partial_rotary_factor", 0.25 if not rope else 1.0)
        plain = {"rope_type": "default", "rope_theta": full.get("rope_theta", 1e6)}
        config["rope_parameters"] = {**rope, "full_attention": plain}
    return config


def _sizes_of_full_layers(reader: ConfigReader) -> tuple[int, int]:
    """Head size and number of key heads in layers without a window."""
    config = reader.config
    groups = reader.number("num_key_value_heads")
    by_layer = config.get(OF_LAYERS)
    if by_layer is None:
        if config.get("attention_k_eq_v"):
            groups = reader.number(OF_FULL_LAYERS["num_key_value_heads"], default=groups)
        return reader.number("global_head_dim", default=GLOBAL_HEAD_DIM), groups
    full = {str(n) for n, window in enumerate(_windows(reader)) if not window}
    own = list(by_layer.values()) if isinstance(by_layer, dict) else []
    legal = (
        isinstance(by_layer, dict)
        and set(by_layer) <= full
        and all(isinstance(sizes, dict) and set(sizes) <= set(OF_FULL_LAYERS) for sizes in own)
        and all(sizes == own[0] for sizes in own)
        and len(own) in (0, len(full))
        and all(isinstance(size, int) and size > 0 for sizes in own for size in sizes.values())
    )
    if not legal:
        reader.refuse(
            f"{OF_LAYERS} {by_layer!r:.200} is not supported; only {' and '.join(OF_FULL_LAYERS)} "
            "may differ, equally in all layers without a window"
        )
        return 2, groups
    sizes = own[0] if own else {}
    head_dim = int(sizes.get("head_dim", reader.number("head_dim")))
    return head_dim, int(sizes.get("num_key_value_heads", groups))


def _settings(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    require_values(reader, {"hidden_activation": gemma3.ACTIVATION})
    if config.get("use_bidirectional_attention") == "all":
        reader.refuse("use_bidirectional_attention 'all': only causal attention is supported")
    head_dim, groups = _sizes_of_full_layers(reader)
    if reader.number("num_attention_heads") % groups:
        reader.refuse(
            f"{groups} key heads of layers without a window do not divide num_attention_heads"
        )
    cap = config.get("final_logit_softcapping")
    cap = None if cap is None else reader.number("final_logit_softcapping", whole=False)
    return {
        "kv_channels": head_dim,
        "num_query_groups": groups,
        "window_channels": reader.number("head_dim"),
        "window_groups": reader.number("num_key_value_heads"),
        "keys_are_values": bool(config.get("attention_k_eq_v")),
        "value_norm": True,
        "rotary_share": float(reader.number(SHARE, default=1.0, whole=False)),
        "window_rotary_base": window_theta(reader),
        "layer_scalars": True,
        "logit_softcap": cap,
        "softmax_scale": 1.0,
        "activation_func": "gelu_tanh",
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "embedding_scale": float(reader.number("hidden_size")) ** 0.5,
        **_shared_keys(reader),
        **_layer_inputs(reader),
        **(_experts(reader) if config.get("enable_moe_block") else {}),
    }


def _shared_keys(reader: ConfigReader) -> dict[str, object]:
    """Of the last layers, without keys and values of their own."""
    config = reader.config
    if not config.get(SHARED_KEYS):
        return {}
    count = reader.number(SHARED_KEYS)
    windows = _windows(reader)
    wide = bool(config.get("use_double_wide_mlp"))
    if count >= len(windows):
        reader.refuse(f"{SHARED_KEYS} {count} must be less than the {len(windows)} layers")
    elif len(lending_layers(windows, count)) < len(set(windows[-count:])):
        reader.refuse(
            f"{SHARED_KEYS} {count}: of each kind of layers, with a window and without, one must "
            "be before them, whose keys they share"
        )
    if wide and config.get("enable_moe_block"):
        reader.refuse("use_double_wide_mlp is not supported with enable_moe_block")
    return {"shared_key_layers": count, "wide_mlps": wide}


def _layer_inputs(reader: ConfigReader) -> dict[str, object]:
    if not reader.config[PER_LAYER]:
        return {}
    tokens = reader.config.get("vocab_size_per_layer_input")
    if tokens not in (None, vocabulary := reader.config.get("vocab_size")):
        reader.refuse(
            f"vocab_size_per_layer_input {tokens!r} must be vocab_size {vocabulary!r}: each token "
            "has inputs of layers"
        )
    return {"layer_input_size": reader.number(PER_LAYER)}


def unused_keys(reader: ConfigReader) -> tuple[str, ...]:
    """See `UNUSED`. They pass through a run unchanged."""
    layers = reader.number("num_hidden_layers")
    sharing = int(reader.config.get(SHARED_KEYS) or 0)
    return tuple(
        f"{HF_ATTENTION.format(layer=layer)}.{name}"
        for layer in range(layers - sharing, layers)
        for name in UNUSED
    )


def _experts(reader: ConfigReader) -> dict[str, object]:
    """Of all layers. Weights of a softmax are renormalised."""
    experts = reader.number("num_experts")
    topk = reader.number("top_k_experts")
    if topk > experts or topk == 1:
        reader.refuse(f"top_k_experts {topk} must be from 2 to num_experts {experts}")
    return {
        "experts_beside_mlp": True,
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": reader.number("moe_intermediate_size"),
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": reader.number("intermediate_size"),
    }


def _windows(reader: ConfigReader) -> list[bool]:
    """Five of six layers; the last has none in either case."""
    layers = reader.number("num_hidden_layers")
    kinds: Iterable[str] | None = reader.config.get("layer_types")
    used = [(n + 1) % 6 != 0 for n in range(layers)]
    if kinds is not None:
        used = [kind == "sliding_attention" for kind in kinds]
    return [*used[:-1], False]


GEMMA4 = ModelFamily(
    "Gemma4ForCausalLM",
    "gemma4_text",
    PARAMETERS,
    required=("num_key_value_heads", "head_dim", "sliding_window"),
    keys=frozenset(KEYS),
    qk_norm=True,
    meant=_meant,
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 131072},
    settings=_settings,
    windows=_windows,
    unused_weights=unused_keys,
    layer_types=WINDOWS,
    rope_theta=1e6,
    tiny={
        **{"hidden_size": 44, "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4},
        **{"num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 6},
        **{PER_LAYER: 0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
        "layer_types": ("sliding_attention", "full_attention"),
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)
register_model_family(GEMMA4)
