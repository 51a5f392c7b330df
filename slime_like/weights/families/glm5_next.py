"""GLM-5.3-Flash: Kimi delta attention with bounded decays in most layers, latent attention without
rotary embedding to pooled keys in the others (megatron/model/sparse_attention.py), several residual
streams (megatron/model/hyper_connections.py), and DeepSeek-V3's experts with clamped activations.

The published files have a vision tower, and another layer that predicts tokens; neither is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from typing import Any

from slime_like.weights.families import deepseek_v3, kimi_linear
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.deepseek_v4 import hyper_parameters
from slime_like.weights.families.deepseek_v32 import (
    HF_INDEXER,
    INDEXER,
    INDEXER_PARAMETERS,
    SHARING,
    SIZES,
    indexer_types,
)
from slime_like.weights.families.delta_net import PerValueHead
from slime_like.weights.families.shells import IN_MODEL, QWEN_TOWER, renamed
from slime_like.weights.families.shells import KEYS as SHELL_KEYS
from slime_like.weights.families.sigmoid_experts import TINY as TINY_EXPERTS
from slime_like.weights.mappings import Mapping, ReplicatedRows

# key of the delta nets -> name within `linear_attn_config`
DELTA_NETS = {**kimi_linear.DELTA_NETS, "linear_lower_bound": "gate_lower_bound"}
SAFE_GATE = "safe_gate"  # another name there: decays have a bound also where none is given
LOWEST_DECAY = -5.0
# what no shape of a tensor shows -> transformers' default
DEFAULTS = {
    **{"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0},
    **{"hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "index_topk": 2048},
    **{"linear_lower_bound": LOWEST_DECAY, "max_position_embeddings": 1048576},
}
UNBOUNDED = 0  # stands for a `linear_lower_bound` of null
NOPE_KEYS = ("head_dim", "qk_rope_head_dim")  # 0 in the files
FIXED = {"index_kpool_always_select_tail": True, "qk_rope_head_dim": None}
KEYS = frozenset(
    {
        *SIZES,
        *SHARING,
        *DELTA_NETS,
        *FIXED,
        kimi_linear.LAYERS,
        "index_kpool",
        "swiglu_limit",
        "hc_mult",
        "hc_eps",
        "hc_sinkhorn_iters",
    }
)


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of 0 are left out, and a bound that is null is kept. Also the settings of delta nets
    that the file has in an object."""
    found = {k: v for k, v in config.items() if not (k in NOPE_KEYS and v == 0)}
    bound = found.get("linear_lower_bound", LOWEST_DECAY)
    nested = config.get(kimi_linear.LAYERS)
    if nested is not None:
        found |= {key: nested[name] for key, name in DELTA_NETS.items() if name in nested}
        bound = found.get("linear_lower_bound", bound)
        if bound is None and nested.get(SAFE_GATE, True):
            bound = LOWEST_DECAY
        rest = {k: v for k, v in nested.items() if k not in (*DELTA_NETS.values(), SAFE_GATE)}
        found[kimi_linear.LAYERS] = rest
    return {**found, "linear_lower_bound": UNBOUNDED if bound is None else bound}


def _derived(config: MappingOf[str, Any]) -> dict[str, object]:
    """What transformers derives from the number of layers."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):  # reported elsewhere
        return {}
    kinds = ("linear_attention", "linear_attention", "linear_attention", "indexed_attention")
    found: dict[str, object] = {"layer_types": [kinds[n % 4] for n in range(layers)]}
    if config.get("first_k_dense_replace") is None:
        found["mlp_layer_types"] = ["dense" if n < 3 else "sparse" for n in range(layers)]
    return found


def _settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, FIXED)
    sizes = {key: reader.number(key) for key in SIZES}
    pool = reader.number("index_kpool")
    if sizes["index_topk"] % pool:
        reader.refuse(f"index_kpool {pool} does not divide index_topk {sizes['index_topk']}")
    delta = kimi_linear.delta_settings(reader)
    return {
        **deepseek_v3.deepseek_settings(reader),
        **delta,
        **sizes,
        "linear_decay_bound": _decay_bound(reader),
        "index_pool": pool,
        "index_shared": _shared_indexers(reader, delta["linear_attention_freq"]),
        "activation_func_clamp_value": float(reader.number("swiglu_limit", whole=False)),
        "latent_norm_epsilon": reader.number("rms_norm_eps", whole=False),
        "residual_streams": reader.number("hc_mult"),
        "sinkhorn_iterations": reader.number("hc_sinkhorn_iters"),
        "sinkhorn_epsilon": reader.number("hc_eps", whole=False),
    }


def _decay_bound(reader: ConfigReader) -> float | None:
    bound = reader.config["linear_lower_bound"]
    if bound == UNBOUNDED:
        return None
    if not isinstance(bound, int | float) or not bound < 0:
        reader.refuse(f"linear_lower_bound must be a negative number or null, not {bound!r}")
        return LOWEST_DECAY
    return float(bound)


def _shared_indexers(reader: ConfigReader, linear: list[int]) -> list[int] | None:
    """Layers of attention that take the selection of the layer before. A kind that the file gives a
    delta net says nothing."""
    kinds = indexer_types(reader)
    shared = [
        int(kind == "shared" and not is_linear)
        for kind, is_linear in zip(kinds, linear, strict=False)
    ]
    for layer, is_shared in enumerate(shared):
        if is_shared and (linear[layer - 1] or shared[layer - 1]):
            reader.refuse(
                f"indexer_types has 'shared' for layer {layer} of 0 to {len(shared) - 1}, and the "
                "layer before it has no indexer"
            )
    return shared if any(shared) else None


def _prediction_layers(reader: ConfigReader) -> tuple[str, ...]:
    """Names of the layers after the model's own."""
    first = reader.number("num_hidden_layers")
    count = int(reader.config.get("num_nextn_predict_layers") or 0)
    return tuple(f"model.language_model.layers.{first + n}." for n in range(count))


PARAMETERS: dict[str, Mapping] = {
    **deepseek_v3.PARAMETERS,
    **kimi_linear.DELTA_PARAMETERS,
    f"{ATTENTION}.A_log": PerValueHead(f"{HF_ATTENTION}.A_log"),
    **INDEXER_PARAMETERS,
    f"{INDEXER}.pool_gate": ReplicatedRows(f"{HF_INDEXER}.index_kpool_compress_gate", "index_dim"),
    f"{INDEXER}.pool_bias": ReplicatedRows(
        f"{HF_INDEXER}.index_kpool_compress_ape", "index_pool", "index_dim"
    ),
    **hyper_parameters("model.layers.{layer}"),
}

register_model_family(
    ModelFamily(
        "Glm5NextForConditionalGeneration",
        "glm5_next",
        renamed(PARAMETERS, IN_MODEL),
        required=(
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "hc_mult"),
            *("n_routed_experts", "num_experts_per_tok", "index_kpool", *SIZES),
        ),
        keys=deepseek_v3.KEYS | SHELL_KEYS | KEYS,
        meant=_meant,
        defaults=DEFAULTS,
        derived=_derived,
        settings=_settings,
        stand_ins={"head_dim": "qk_nope_head_dim"},
        text_config=("glm5_next_text",),
        layer_types=kimi_linear.LAYER_TYPES | {"indexed_attention"},
        untrained_prefixes=("model.visual.",),
        unused_weights=_prediction_layers,
        published=("GLM-5.3-Flash",),
        vision="is offered here without images",
        tiny={
            **{k: v for k, v in TINY_EXPERTS.items() if not k.startswith(("first_k", "num_next"))},
            **{"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16, "head_dim": 0},
            **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 0, "v_head_dim": 10},
            **{"linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 4},
            **{"index_topk": 8, "index_kpool": 4, "index_n_heads": 12, "index_head_dim": 14},
            **{"hc_mult": 3, "hc_sinkhorn_iters": 5, "swiglu_limit": 0.4, "rms_norm_eps": 1e-4},
            "layer_types": ("linear_attention", "indexed_attention"),
            "mlp_layer_types": ("dense", "sparse"),
            "vision_config": {
                **{k: v for k, v in QWEN_TOWER.items() if k != "num_position_embeddings"},
                **{"image_size": 8, "projection_intermediate_size": 20},
            },
        },
    )
)
