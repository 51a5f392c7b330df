"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention to the keys that an indexer selects
(slime_like/megatron/model/sparse_attention.py).

DeepSeek's indexers have a rotary embedding by halves, GLM's an interleaved one. In GLM-5.2 most
layers have no indexer and reuse the selection of the last layer that has one.
"""

from __future__ import annotations

import dataclasses

from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    ConfigReader,
    register_model_family,
    require_values,
)
from slime_like.weights.families.deepseek_v3 import DEEPSEEK_V3, deepseek_settings
from slime_like.weights.mappings import Mapping, Replicated, ReplicatedRows

SIZES = ("index_topk", "index_n_heads", "index_head_dim")
SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
KINDS = {"F": "full", "S": "shared"}  # letters of `index_topk_pattern`
INDEXER = f"{ATTENTION}.indexer"
HF_INDEXER = f"{HF_ATTENTION}.indexer"
INDEXER_PARAMETERS: dict[str, Mapping] = {
    f"{INDEXER}.wq_b": ReplicatedRows(f"{HF_INDEXER}.wq_b.weight", "index_query", "q_latent"),
    f"{INDEXER}.wk": ReplicatedRows(f"{HF_INDEXER}.wk.weight", "index_dim"),
    f"{INDEXER}.k_norm_weight": Replicated(f"{HF_INDEXER}.k_norm.weight", "index_dim"),
    f"{INDEXER}.k_norm_bias": Replicated(f"{HF_INDEXER}.k_norm.bias", "index_dim"),
    f"{INDEXER}.weights_proj": ReplicatedRows(f"{HF_INDEXER}.weights_proj.weight", "index_heads"),
}


def _sparse_settings(reader: ConfigReader, *, interleaved: bool) -> dict[str, object]:
    require_values(reader, {"indexer_rope_interleave": interleaved})
    sizes = {key: reader.number(key) for key in SIZES}
    rotated = reader.number("qk_rope_head_dim")
    if sizes["index_head_dim"] < rotated:
        reader.refuse(
            f"index_head_dim {sizes['index_head_dim']} is smaller than qk_rope_head_dim {rotated}"
        )
    return {**deepseek_settings(reader), **sizes, "index_rotary_interleaved": interleaved}


def _deepseek(reader: ConfigReader) -> dict[str, object]:
    return _sparse_settings(reader, interleaved=False)


def _glm(reader: ConfigReader) -> dict[str, object]:
    shared = [int(kind == "shared") for kind in indexer_types(reader)]
    return {
        **_sparse_settings(reader, interleaved=True),
        "index_shared": shared if any(shared) else None,
    }


def indexer_types(reader: ConfigReader) -> list[str]:
    """Kind of each layer, "full" or "shared". Reports unsupported settings to the reader."""
    layers = reader.number("num_hidden_layers")
    scheduled = _schedule(reader, layers)
    kinds = reader.config.get("indexer_types")
    kinds = scheduled if kinds is None else kinds
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        reader.refuse(
            f"indexer_types {kinds!r:.200}: each of the {layers} layers must be 'full' or "
            "'shared', and the first one 'full'"
        )
    elif scheduled != kinds and any(reader.config.get(key) for key in SHARING[1:3]):
        reader.refuse(
            f"indexer_types {kinds!r:.200} differ from index_topk_pattern or index_topk_freq"
        )
    return kinds


def _schedule(reader: ConfigReader, layers: int) -> list[str]:
    """The schedule that transformers derives if `indexer_types` is absent."""
    if (pattern := reader.config.get("index_topk_pattern")) is not None:
        return [KINDS.get(letter, letter) for letter in pattern]
    every = reader.number("index_topk_freq", default=1)
    offset = reader.number("index_skip_topk_offset", default=2)
    return ["shared" if max(n - offset + 1, 0) % every else "full" for n in range(layers)]


def _indexers_without_use(reader: ConfigReader) -> tuple[str, ...]:
    """Indexer weights of layers that reuse another layer's selection; some files contain them."""
    return tuple(
        f"{HF_INDEXER}.".format(layer=layer)
        for layer, kind in enumerate(indexer_types(reader))
        if kind == "shared"
    )


DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    parameters={**DEEPSEEK_V3.parameters, **INDEXER_PARAMETERS},
    required=(*DEEPSEEK_V3.required, "q_lora_rank", *SIZES),
    keys=DEEPSEEK_V3.keys | {*SIZES, "indexer_rope_interleave"},
    settings=_deepseek,
    defaults={**DEEPSEEK_V3.defaults, "max_position_embeddings": 163840},
    other_model_types=(),
    layer_types=frozenset({"indexed_attention"}),
    published=("DeepSeek-V3.2",),
    tiny={
        **DEEPSEEK_V3.tiny,
        **{"index_topk": 4, "index_n_heads": 12, "index_head_dim": 14},
    },
)
register_model_family(DEEPSEEK_V32)
register_model_family(
    dataclasses.replace(
        DEEPSEEK_V32,
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        keys=DEEPSEEK_V32.keys
        # what several drafted tokens share, and the type of the router's products
        | {*SHARING, "index_share_for_mtp_iteration", "moe_router_dtype"},
        settings=_glm,
        defaults={
            **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752},
            **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
        },
        unused_weights=_indexers_without_use,
        published=("GLM-5",),
        tiny={**DEEPSEEK_V32.tiny, "n_group": 1, "topk_group": 1},
    )
)
