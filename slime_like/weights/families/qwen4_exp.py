"""Qwen3.8-Flash-Next, whose architecture is Qwen4Exp: Qwen3.5's delta nets, attention and experts,
with gated residual streams and attention to pooled keys (megatron/model/gated_streams.py).

Its memory of n-grams (`ple_layer_ids`) is not supported, and the published files have one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping as MappingOf
from typing import Any

from slime_like.weights.families import qwen3_5, shells
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    ConfigReader,
    register_model_family,
    require_values,
)
from slime_like.weights.families.delta_net import LAYER_TYPES
from slime_like.weights.mappings import Mapping, Replicated, ReplicatedRows

LAYER = "decoder.layers.{layer}"
HF_LAYER = "model.layers.{layer}"
MIXER = "model.hyper_connection_mixer"
INDEXER = f"{ATTENTION}.indexer"
HF_INDEXER = f"{HF_ATTENTION}.indexer"
NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "final_layernorm.weight")
# field of TransformerConfig -> key
SIZES = {
    "residual_streams": "hc_count",
    "stream_rank": "hc_lowrank",
    "index_n_heads": "indexer_n_heads",
    "index_head_dim": "indexer_head_dim",
    "index_topk": "indexer_budget",
    "index_pool": "indexer_compress_ratio",
}
# of the memory of n-grams, without which they have no effect
MEMORY = (
    "ple_embed_dim",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "split_ngram_parts",
    "seed",
    "number_of_conv_states",
)
DEFAULTS = {"hc_count": 4, "hc_lowrank": 320, "norm_topk_prob": True}


def _whole_rotary(reader: ConfigReader) -> float:
    """Rotary share of files without `partial_rotary_factor`."""
    return 1.0


def _derived(config: MappingOf[str, Any]) -> dict[str, object]:
    """What transformers derives from the number of layers. No layer is dense."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):  # reported elsewhere
        return {}
    every = config.get("full_attention_interval") or 4
    kinds = ["linear_attention" if (n + 1) % every else "indexed_attention" for n in range(layers)]
    return {"layer_types": kinds, "intermediate_size": config.get("moe_intermediate_size")}


def _settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, {"indexer_kv_heads": 1})
    if layers := reader.config.get("ple_layer_ids"):
        reader.refuse(
            f"ple_layer_ids {layers!r:.80}: a memory of n-grams (per-layer embeddings) is not "
            "supported; what else this architecture has is"
        )
    sizes = {field: reader.number(key) for field, key in SIZES.items()}
    topk = sizes["index_topk"]
    pool = sizes["index_pool"]
    if topk % pool:
        reader.refuse(f"indexer_compress_ratio {pool} does not divide indexer_budget {topk}")
    return {**qwen3_5.SPARSE_TEXT.settings(reader), **sizes}


def _connection(own: str, file: str) -> dict[str, Mapping]:
    return {
        f"{own}.norm_weight": Replicated(f"{file}.hc_norm.weight", "stream_channels"),
        f"{own}.down_weight": _Matrix(
            f"{file}.input_mix_weight_down.weight", "stream_rank", "stream_channels"
        ),
        f"{own}.up_weight": _Matrix(
            f"{file}.input_mix_weight_up.weight", "stream_channels", "stream_rank"
        ),
    }


class _Matrix(ReplicatedRows):
    """A matrix on every rank that can have no adapter."""

    linear = False


def _hyper_parameters() -> dict[str, Mapping]:
    found: dict[str, Mapping] = {}
    for own, block in {"self_attention": "attn", "mlp": "mlp"}.items():
        prefix = f"{LAYER}.{own}_hyper_connection"
        file = f"{HF_LAYER}.{block}_hyper_connection"
        found |= _connection(prefix, file)
        found[f"{prefix}.inject_weight"] = _Matrix(
            f"{file}.block_inject_weight.weight", "streams", "stream_channels"
        )
    return found | _connection("decoder.final_layernorm", MIXER)


PARAMETERS: dict[str, Mapping] = {
    **{name: mapping for name, mapping in qwen3_5.SPARSE.items() if not name.endswith(NORMS)},
    f"{INDEXER}.query_key_weight": ReplicatedRows(
        f"{HF_INDEXER}.index_qk_proj.weight", "index_query_key"
    ),
    f"{INDEXER}.query_norm_weight": Replicated(f"{HF_INDEXER}.q_layernorm.weight", "index_dim"),
    f"{INDEXER}.key_norm_weight": Replicated(f"{HF_INDEXER}.k_layernorm.weight", "index_dim"),
    **_hyper_parameters(),
}
TEXT = dataclasses.replace(
    qwen3_5.SPARSE_TEXT,
    architecture="Qwen4ExpForCausalLM",
    model_type="qwen4_exp_text",
    parameters=PARAMETERS,
    required=(*qwen3_5.SPARSE_TEXT.required, *SIZES.values()),
    keys=qwen3_5.SPARSE_TEXT.keys | {*SIZES.values(), *MEMORY, "indexer_kv_heads", "ple_layer_ids"},
    settings=_settings,
    defaults=DEFAULTS,
    derived=_derived,
    layer_types=LAYER_TYPES | {"indexed_attention"},
    prediction=None,
    rotary_percent=_whole_rotary,
    vision="is offered here without images",
    tiny={
        **{k: v for k, v in qwen3_5.SPARSE_TEXT.tiny.items() if k != "full_attention_interval"},
        **{"hc_count": 3, "hc_lowrank": 7, "indexer_n_heads": 12, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 14, "indexer_budget": 8, "indexer_compress_ratio": 4},
        "layer_types": ("linear_attention", "indexed_attention"),
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        },
    },
)
register_model_family(TEXT)
register_model_family(
    dataclasses.replace(
        TEXT,
        architecture="Qwen4ExpForConditionalGeneration",
        model_type="qwen4_exp",
        parameters=shells.renamed(PARAMETERS, shells.IN_MODEL),
        text_config=("qwen4_exp_text",),
        published=("Qwen3.8-Flash-Next",),  # with a memory, which is refused
        tiny={**TEXT.tiny, "vision_config": shells.QWEN_TOWER},
    )
)
