"""Step-3.5-Flash, and the text of Step-3.7-Flash: layers with a sliding window among layers
without, with their own numbers of heads, rotary base and share of a head that is rotated; a gate
for each head's output; zero-centered norms; experts with sigmoid routing and a shared one, whose
activations are clamped in some layers (megatron/model/clamped_mlp.py).

The published files have further layers that predict tokens, which are not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from slime_like.weights.families import llama, sigmoid_experts
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    MLP,
    WINDOWS,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
    window_theta,
)
from slime_like.weights.families.experts import EXPERT, shared_expert_parameters
from slime_like.weights.families.shells import shell
from slime_like.weights.layer_sizes import SizedGatedQKV, SizedOutput
from slime_like.weights.mappings import Mapping, Replicated, ReplicatedRows
from slime_like.weights.stacked_experts import DownRows, GateAndUpRows

HF_LAYER = "model.layers.{layer}"
PARAMETERS: dict[str, Mapping] = {
    **llama.PARAMETERS,
    f"{ATTENTION}.linear_qkv.weight": SizedGatedQKV(
        f"{HF_ATTENTION}.q_proj.weight",
        f"{HF_ATTENTION}.k_proj.weight",
        f"{HF_ATTENTION}.v_proj.weight",
        gate=f"{HF_ATTENTION}.g_proj.weight",
    ),
    f"{ATTENTION}.linear_proj.weight": SizedOutput(f"{HF_ATTENTION}.o_proj.weight", "query"),
    f"{ATTENTION}.q_layernorm.weight": Replicated(f"{HF_ATTENTION}.q_norm.weight", "head_dim"),
    f"{ATTENTION}.k_layernorm.weight": Replicated(f"{HF_ATTENTION}.k_norm.weight", "head_dim"),
    f"{MLP}.router.weight": ReplicatedRows(f"{HF_LAYER}.moe.gate.weight", "experts"),
    f"{MLP}.router.expert_bias": Replicated(f"{HF_LAYER}.moe.router_bias", "experts"),
    f"{EXPERT}.linear_fc1.weight": GateAndUpRows(
        f"{HF_LAYER}.moe.gate_proj.weight", up=f"{HF_LAYER}.moe.up_proj.weight"
    ),
    f"{EXPERT}.linear_fc2.weight": DownRows(f"{HF_LAYER}.moe.down_proj.weight"),
    **shared_expert_parameters(f"{HF_LAYER}.share_expert"),
}
TOWER = ("vision_model.", "vit_large_projector.")
# key that is read here -> others for it in published files
NAMES = {
    "num_key_value_heads": ("num_attention_groups",),
    "n_routed_experts": ("moe_num_experts", "num_local_experts"),
    "num_experts_per_tok": ("moe_top_k",),
    "share_expert_dim": ("share_expert_dims",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}
OTHER_NAMES = {other: key for key, others in NAMES.items() for other in others}
# a value for each layer, in published files also for those that predict tokens
BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
WINDOW_HEADS = "num_sliding_attention_heads"
OTHER_SETTING = "attention_other_setting"  # of layers with a window, in published files
OF_LAYERS = "per_layer_config"  # the same in transformers', by number of the layer
FIXED = {
    **{"use_head_wise_attn_gate": True, "gating": True, "use_qk_norm": True},
    **{"zero_centered": True, "att_impl_type": "GQA", "use_bidirectional_attention": False},
    **{"use_moe": True, "moe_router_activation": "sigmoid", "use_moe_router_bias": True},
    **{"norm_expert_weight": True, "moe_every_n_layer": 1, "moe_layer_offset": 0, "sink": False},
    "yarn_only_types": ["full_attention"],
}
KEYS = frozenset(
    {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "share_expert_dim"),
        *("moe_router_scaling_factor", "moe_layers_enum", "mlp_layer_types"),
        *("swiglu_limits", "swiglu_limits_shared", "query_pre_attn_scalar", "sliding_window"),
        *("partial_rotary_factors", "num_nextn_predict_layers", *OTHER_NAMES, *FIXED),
        *(WINDOW_HEADS, OTHER_SETTING, OF_LAYERS),
        # without effect: of the layers that predict tokens, of tokens, and of precision
        *("mtp_layer_types", "mtp_mlp_layer_types", "output_router_logits", "max_seq_len"),
        "need_fp32_gate",
    }
)
SHELL_KEYS = frozenset(
    {"projector_bias", "understand_projector_stride", "image_token_len", "patch_token_len"}
)
KINDS = ("full_attention", "sliding_attention")


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """The published keys as transformers has them: lists without the layers that predict tokens,
    rotary embeddings by the kind of a layer, the layers with experts by their names."""
    config = dict(config)
    for other, key in OTHER_NAMES.items():
        if config.get(key) is None:
            config[key] = config.get(other)
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):  # reported elsewhere
        return config
    padded = layers + int(config.get("num_nextn_predict_layers") or 0)
    for key in BY_LAYER:
        if isinstance(config.get(key), list) and len(config[key]) == padded:
            config[key] = config[key][:layers]
    if config.get("layer_types") is None:
        config["layer_types"] = ["full_attention"] * layers
    if config.get("mlp_layer_types") is None:
        experts = _numbers(config.get("moe_layers_enum"), layers)
        kinds = ("dense", "sparse")
        config["mlp_layer_types"] = [kinds[layer in experts] for layer in range(layers)]
    if config.get(WINDOW_HEADS) is None:
        other_setting = config.get(OTHER_SETTING) or {}
        config[WINDOW_HEADS] = other_setting.get("num_attention_heads")
    _name_rope_by_kind(config)
    return config


def _numbers(listed: str | Sequence[int] | None, layers: int) -> set[str | int]:
    """Of layers with experts; without a list, transformers' default. What is no number is kept, and
    reported by `_experts`."""
    if listed is None:
        return set(range(3, layers))
    words: Iterable[str | int] = listed.split(",") if isinstance(listed, str) else listed
    stripped = [str(word).strip() for word in words]
    return {int(word) if word.isdecimal() else word for word in stripped if word}


def _name_rope_by_kind(config: dict[str, Any]) -> None:
    """Put lists of bases and shares, and the scaling, under `rope_parameters`, as far as layers of
    a kind agree."""
    kinds = config["layer_types"]
    given = config.get("rope_parameters") or {}
    if given or not isinstance(kinds, list):
        return
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(kinds):
        own: dict[str, Any] = {"rope_type": "default"}
        for key, name in (
            ("rope_theta", "rope_theta"),
            ("partial_rotary_factors", "partial_rotary_factor"),
        ):
            value = config.get(key)
            if isinstance(value, list):
                of_kind = {x for x, k in zip(value, kinds, strict=False) if k == kind}
                if len(of_kind) != 1 or len(value) != len(kinds):
                    return  # reported by `_settings`
                (value,) = of_kind
            if value is not None:
                own[name] = value
        found[kind] = own
    if (scaling := config.pop("rope_scaling", None)) and KINDS[0] in found:
        found[KINDS[0]] |= scaling
    config.pop("rope_theta", None)
    config.pop("partial_rotary_factors", None)
    config["rope_parameters"] = found


def _settings(reader: ConfigReader) -> dict[str, object]:
    config = reader.config
    require_values(reader, FIXED)
    require_values(reader, {other: config.get(key) for other, key in OTHER_NAMES.items()})
    _check_lists(reader)
    heads = reader.number("num_attention_heads")
    groups = reader.number("num_key_value_heads")
    head_dim = reader.number("head_dim")
    window_heads = reader.number(WINDOW_HEADS, default=heads)
    if window_heads % groups:
        reader.refuse(
            f"num_key_value_heads {groups} does not divide the {window_heads} heads of layers with "
            "a window"
        )
    _check_other_setting(reader, window_heads)
    rope = config.get("rope_parameters") or {}
    share = (rope.get("sliding_attention") or {}).get("partial_rotary_factor", 1.0)
    width = int(head_dim * share)
    if not 0 < share <= 1 or width % 2:
        reader.refuse(
            f"partial_rotary_factor {share!r} of layers with a window must be in 0 < x <= 1, and "
            f"rotate an even number of the {head_dim} dimensions of a head"
        )
    scalar = reader.number("query_pre_attn_scalar", default=head_dim, whole=False)
    return {
        **_experts(reader),
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": float(scalar) ** -0.5,
        "head_gates": True,
        "window_heads": window_heads,
        "window_groups": groups,
        "window_rotary_base": window_theta(reader),
        "window_rotary_width": width,
        "expert_clamps": _clamps(reader, "swiglu_limits"),
        "mlp_clamps": _clamps(reader, "swiglu_limits_shared"),
    }


def _check_lists(reader: ConfigReader) -> None:
    """Lists with a value for each layer; those of rotary embeddings with one for each kind."""
    config = reader.config
    layers = reader.number("num_hidden_layers")
    for key in BY_LAYER:
        value = config.get(key)
        if isinstance(value, list) and len(value) != layers:
            reader.refuse(
                f"{key} has {len(value)} layers; it must have num_hidden_layers, or also those of "
                "num_nextn_predict_layers"
            )
    for key in ("rope_theta", "partial_rotary_factors"):
        if isinstance(config.get(key), list):
            reader.refuse(f"{key} {config.pop(key)!r:.200}: layers of one kind must agree")
    if (share := config.pop("partial_rotary_factor", None)) is not None:
        reader.refuse(
            f"partial_rotary_factor {share!r} is not supported with this architecture, which has "
            "partial_rotary_factors by layer"
        )
    rope = config.get("rope_parameters") or {}
    kinds = set(config.get("layer_types") or ())
    if not all(isinstance(rope.get(kind), dict) for kind in kinds & set(KINDS)):
        reader.refuse(
            f"rope_parameters {rope!r:.200} must have an object for each kind of layers: "
            f"{', '.join(sorted(kinds))}"
        )
        config["rope_parameters"] = None


def _check_other_setting(reader: ConfigReader, window_heads: int) -> None:
    """Layers with a window differ in the number of heads alone."""
    config = reader.config
    allowed = {
        "attention_type": "sliding_attention",
        "num_attention_heads": window_heads,
        "num_attention_groups": config["num_key_value_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "true_head_dim": config["head_dim"],
    }
    given = config.get(OTHER_SETTING) or {}
    for key, value in given.items():
        if key not in allowed or value != allowed[key]:
            reader.refuse(
                f"{OTHER_SETTING} with {key} {value!r} is not supported: layers with a window "
                f"differ in {WINDOW_HEADS} {window_heads} alone"
            )
    windows = [n for n, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"]
    by_layer = config.get(OF_LAYERS)
    expected = {str(layer): {"num_attention_heads": window_heads} for layer in windows}
    if by_layer and by_layer != expected:
        reader.refuse(
            f"{OF_LAYERS} {by_layer!r:.200} is not supported; it must give all layers with a "
            f"window {window_heads} heads ({WINDOW_HEADS}), and the others nothing"
        )


def _clamps(reader: ConfigReader, key: str) -> list[float] | None:
    """By layer; null and 0 are none."""
    given = reader.config.get(key) or []
    bounds = [float(bound or 0) for bound in given]
    if any(bound < 0 for bound in bounds):
        reader.refuse(f"{key} {given!r:.200} must not be negative")
    return bounds if any(bounds) else None


def _experts(reader: ConfigReader) -> dict[str, object]:
    kinds = reader.config["mlp_layer_types"]
    layers = [int(kind == "sparse") for kind in kinds]
    if set(kinds) - {"dense", "sparse"} or not any(layers):
        reader.refuse(
            f"mlp_layer_types {kinds!r:.200} must be 'dense' and 'sparse', and leave a layer with "
            "experts"
        )
    if not all(isinstance(n, int) for n in _numbers(reader.config.get("moe_layers_enum"), 0)):
        reader.refuse(
            f"moe_layers_enum {reader.config['moe_layers_enum']!r:.200} must be numbers of layers"
        )
    experts = reader.number("n_routed_experts")
    topk = reader.number("num_experts_per_tok")
    if not 1 < topk <= experts:
        reader.refuse(
            f"num_experts_per_tok {topk} must be from 2, since megatron-core does not renormalise "
            f"a single weight, to n_routed_experts {experts}"
        )
    scaling = reader.number("moe_router_scaling_factor", default=1.0, whole=False)
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": reader.number("moe_intermediate_size"),
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(scaling),
        "moe_shared_expert_intermediate_size": reader.number("share_expert_dim"),
        "moe_router_load_balancing_type": "none",
    }


def _rotated(reader: ConfigReader) -> float:
    return 1.0


def _no_windows(reader: ConfigReader) -> list[bool]:
    return [False] * int(reader.number("num_hidden_layers"))


STEP = ModelFamily(
    "Step3p5ForCausalLM",
    "step3p5",
    PARAMETERS,
    required=(
        *("num_key_value_heads", "head_dim", "n_routed_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "share_expert_dim"),
    ),
    keys=KEYS,
    qk_norm=True,
    rotary_percent=_rotated,
    windows=_no_windows,
    layer_types=WINDOWS,
    meant=_meant,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 128000},
    settings=_settings,
    untrained_layers=sigmoid_experts.untrained_layers,
    untrained_prefixes=TOWER,
    published=("Step-3.5-Flash",),
    same_as="step3p7",  # whose text it is; transformers has no class for it alone
    tiny={
        **{"head_dim": 12, "sliding_window": 6, WINDOW_HEADS: 6, "n_routed_experts": 8},
        **{"num_experts_per_tok": 3, "moe_intermediate_size": 24, "share_expert_dim": 20},
        **{"moe_router_scaling_factor": 1.7, "query_pre_attn_scalar": 9, "pad_token_id": 0},
        **{"swiglu_limits": [0.0, 0.1, None], "swiglu_limits_shared": [0.2, 0.15, 0.0]},
        "layer_types": ("full_attention", "sliding_attention"),
        "mlp_layer_types": ("dense", "sparse"),
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "llama3", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
                **{"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {
                **{"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
            },
        },
    },
)
TINY_TOWER = {
    **{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "image_size": 8},
    **{"patch_size": 4, "mlp_ratio": 2.0},
}
register_model_family(STEP)
register_model_family(
    shell(
        dataclasses.replace(STEP, keys=KEYS | SHELL_KEYS, untrained_prefixes=()),
        "Step3p7ForConditionalGeneration",
        "step3p7",
        ("step3p5",),
        {},
        TOWER,
        ("Step-3.7-Flash",),
        TINY_TOWER,
        vision="is offered here without images",
    )
)
