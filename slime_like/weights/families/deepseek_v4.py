"""DeepSeek-V4: attention to a window and to compressed entries (megatron/model/
compressed_attention.py), several residual streams (megatron/model/hyper_connections.py), and
experts in every layer, which the first layers select by a table of tokens (megatron/ops/router.py).

Tensors have the names of the published files, which transformers' class gives others. The published
files also have layers that predict tokens (`mtp.`); they are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_like.weights.families.base import (
    ATTENTION,
    EMBEDDING,
    MLP,
    OUTPUT_LAYER,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.experts import EXPERT, WITHOUT_EFFECT
from slime_like.weights.mappings import (
    ColumnParallel,
    GatedMLP,
    HeadParallel,
    Mapping,
    OfLayer,
    Replicated,
    ReplicatedMatrix,
    ReplicatedRows,
    RowParallel,
    Sizes,
    TensorPart,
    TokenExperts,
    VocabParallel,
)
from slime_like.yarn import Yarn

DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
LAYER = "decoder.layers.{layer}"
HF_LAYER = "layers.{layer}"
HF_ATTENTION = f"{HF_LAYER}.attn"
HF_EXPERTS = f"{HF_LAYER}.ffn"
FINAL = "decoder.final_layernorm"
WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
# of `compress_ratios` in the published files, which have no other numbers
KINDS = {0: WINDOW, 4: SPARSE, 128: HEAVY}
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, SCORED = "hash_moe", "moe"  # of `mlp_layer_types`
HASHED_LAYERS = 3  # transformers' default
ROTARY_SHARE = 64 / 512  # the same
ENTRY_ROPE = "compress_rope"  # our key: the rotary embedding of layers with entries
MAIN_THETA, ENTRY_THETA = 10000.0, 160000.0
# key of YaRN -> transformers' default
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
# our field -> key
SIZES = {
    "q_lora_rank": "q_lora_rank",
    "rotary_width": "qk_rope_head_dim",
    "entry_topk": "index_topk",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "output_groups": "o_groups",
    "output_rank": "o_lora_rank",
}
FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    # published files have FP4 experts, which no reader here knows
    "expert_dtype": None,
}
DEFAULTS = {
    **{"rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0},
    **{"hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "index_topk": 512},
    **{"sliding_window": 128, "o_groups": 8, "max_position_embeddings": 1048576},
}
KEYS = WITHOUT_EFFECT | {
    *SIZES.values(),
    *FIXED,
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_eps", "hc_sinkhorn_iters"),
    *("compress_rates", "compress_rope_theta", "mlp_layer_types", "num_nextn_predict_layers"),
    ENTRY_ROPE,
}


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of transformers, for those of the published files, and one rotary embedding under
    each of two keys."""
    found = dict(config)
    layers = found.get("num_hidden_layers")
    ratios = found.pop("compress_ratios", None)
    if ratios and found.get("layer_types") is None:
        # of the layers that predict tokens too, which are the last
        found["layer_types"] = [KINDS.get(ratio, f"{ratio!r:.20}") for ratio in ratios[:layers]]
    rates = {**RATES, **(found.get("compress_rates") or {})}
    for kind, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        rates[kind] = found.pop(key, None) or rates[kind]
    found["compress_rates"] = rates
    hashed = found.pop("num_hash_layers", None)
    if found.get("mlp_layer_types") is None and isinstance(layers, int):
        count = HASHED_LAYERS if hashed is None else hashed
        found["mlp_layer_types"] = [HASHED if n < count else SCORED for n in range(layers)]
    share = found.pop("partial_rotary_factor", None)
    if found.get("qk_rope_head_dim") is None and isinstance(found.get("head_dim"), int):
        found["qk_rope_head_dim"] = int(found["head_dim"] * (share or ROTARY_SHARE))
    rope = found.pop("rope_scaling", None) or found.pop("rope_parameters", None) or {}
    entry_theta = found.get("compress_rope_theta") or ENTRY_THETA
    if isinstance(rope.get("main"), dict) and isinstance(rope.get("compress"), dict):
        main = rope["main"]
        given = {key: value for key, value in rope["compress"].items() if value is not None}
        of_entries = {"rope_theta": entry_theta, **given}
    else:  # one for both, whose base is not that of entries
        main = {}
        scaling = {key: value for key, value in rope.items() if key not in ("main", "compress")}
        of_entries = {**scaling, "rope_theta": entry_theta}
    found[ENTRY_ROPE] = of_entries
    theta = main.get("rope_theta") or found.pop("rope_theta", None) or MAIN_THETA
    found.pop("rope_theta", None)
    found["rope_parameters"] = {**main, "rope_theta": theta}
    found["rope_parameters"].pop("partial_rotary_factor", None)
    return found


def _derived(config: MappingOf[str, Any]) -> dict[str, object]:
    """What transformers derives from the number of layers. No layer is dense."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):  # reported elsewhere
        return {}
    kinds = [HEAVY if n < 2 or n % 2 == 0 else SPARSE for n in range(layers)]
    return {"layer_types": kinds, "intermediate_size": config.get("moe_intermediate_size")}


def _settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, FIXED)
    heads = reader.number("num_attention_heads")
    sizes = {field: reader.number(key) for field, key in SIZES.items()}
    if heads % sizes["output_groups"]:
        reader.refuse(f"o_groups {sizes['output_groups']} does not divide {heads} heads")
    width = sizes["rotary_width"]
    if width % 2 or width > reader.number("head_dim"):
        reader.refuse(f"qk_rope_head_dim {width} must be even and at most head_dim")
    return {
        **sizes,
        # keys are of all heads
        "num_query_groups": heads,
        "window_size": (reader.number("sliding_window") - 1, 0),
        "softmax_type": "learnable",
        **_entries(reader),
        **_rotary(reader),
        **_experts(reader),
        "residual_streams": reader.number("hc_mult"),
        "sinkhorn_iterations": reader.number("hc_sinkhorn_iters"),
        "sinkhorn_epsilon": reader.number("hc_eps", whole=False),
    }


def _entries(reader: ConfigReader) -> dict[str, object]:
    kinds = reader.config.get("layer_types") or []
    layers = reader.number("num_hidden_layers")
    if len(kinds) != layers:
        reader.refuse(f"layer_types has {len(kinds)} layers; it must have num_hidden_layers")
    rates = reader.config["compress_rates"]
    legal = set(rates) == set(RATES) and all(isinstance(n, int) and n > 1 for n in rates.values())
    if not legal:
        reader.refuse(
            f"compress_rates {rates!r:.200} must have a number above 1 for each of "
            f"{' and '.join(RATES)}"
        )
        rates = RATES
    return {
        "entry_rates": [rates.get(kind, 0) for kind in kinds],
        "entry_selection": [int(kind == SPARSE) for kind in kinds],
    }


def _rotary(reader: ConfigReader) -> dict[str, object]:
    """The rotary embeddings of layers without and with entries."""
    rope = dict(reader.config[ENTRY_ROPE])
    base = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    found: dict[str, object] = {
        "window_rotary_base": float(reader.config["rope_parameters"]["rope_theta"]),
        "entry_rotary_base": float(base),
        "entry_yarn": None,
    }
    if kind not in ("default", "yarn"):
        reader.refuse(f"rope_type {kind!r} is not supported; legal values: default, yarn")
        return found
    if kind == "yarn":
        numbers = {key: rope.pop(key, default) for key, default in YARN.items()}
        for key in ("factor", "original_max_position_embeddings"):
            numbers[key] = rope.pop(key, None)
            if not isinstance(numbers[key], int | float) or numbers[key] < 1:
                reader.refuse(
                    f"rope_type 'yarn' needs {key}, a number of at least 1, not {numbers[key]!r}"
                )
                numbers[key] = 1
        if rope.pop("attention_factor", None) not in (None, 1, 1.0):
            reader.refuse("rope_type 'yarn' with an attention_factor other than 1 is not supported")
        found["entry_yarn"] = Yarn(
            float(numbers["factor"]),
            int(numbers["original_max_position_embeddings"]),
            float(numbers["beta_fast"]),
            float(numbers["beta_slow"]),
        )
    for key, value in sorted(rope.items()):
        if value is not None:
            reader.refuse(f"rope_type {kind!r} with {key} {value!r} is not supported")
    return found


def _experts(reader: ConfigReader) -> dict[str, object]:
    experts = reader.number("n_routed_experts")
    topk = reader.number("num_experts_per_tok")
    if topk > experts:
        reader.refuse(f"num_experts_per_tok {topk} is above n_routed_experts {experts}")
    if topk == 1:
        reader.refuse(
            "num_experts_per_tok 1 with renormalised weights: every weight is 1, and the router "
            "would never learn"
        )
    layers = reader.number("num_hidden_layers")
    kinds = reader.config.get("mlp_layer_types") or []
    hashed = kinds.count(HASHED)
    if kinds != [HASHED] * hashed + [SCORED] * (layers - hashed):
        reader.refuse(
            f"mlp_layer_types {kinds!r:.200} must have num_hidden_layers of {HASHED!r} and then "
            f"{SCORED!r}"
        )
    ffn = reader.number("moe_intermediate_size")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_layer_freq": 1,
        # megatron-core's own score, which the router does not use
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "router_scores": "sqrtsoftplus",
        "hashed_layers": hashed,
        "hashed_tokens": reader.number("vocab_size"),
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(
            reader.number("routed_scaling_factor", whole=False)
        ),
        "moe_shared_expert_intermediate_size": ffn,
        "moe_router_load_balancing_type": "none",
        "activation_func_clamp_value": float(reader.number("swiglu_limit", whole=False)),
    }


def _tables(reader: ConfigReader) -> tuple[str, ...]:
    """Names of the tables by token, which are saved as they are."""
    hashed = (reader.config.get("mlp_layer_types") or []).count(HASHED)
    return tuple(f"layers.{n}.ffn.gate.tid2eid" for n in range(hashed))


@dataclass(frozen=True)
class ByGroups(ColumnParallel):
    """The first matrix of the output projection, whose rows are sharded by groups of heads; it can
    have no adapter."""

    linear: ClassVar[bool] = False


@dataclass(frozen=True)
class OfEntries(OfLayer):
    """What a compressor has, on every rank. Its layer says for how many tokens."""

    hf: str
    width: str  # a field of Sizes; twice as much with an overlap
    bias: bool = False  # by place within an entry, in place of a matrix
    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rate, overlap = sizes.entries[self.layer]
        width = getattr(sizes, self.width) * (2 if overlap else 1)
        return {self.hf: (rate, width) if self.bias else (width, sizes.hidden)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, self.hf_shapes(sizes)[self.hf][0])]


def hyper_parameters(hf_layer: str) -> dict[str, Mapping]:
    """Parameters of the hyper-connections of a layer. hf_layer: its prefix in the file."""
    found: dict[str, Mapping] = {}
    for own, block in {"self_attention": "attn", "mlp": "ffn"}.items():
        prefix = f"{LAYER}.{own}_hyper_connection"
        file = f"{hf_layer}.hc_{block}"
        found[f"{prefix}.weight"] = ReplicatedMatrix(
            f"{file}_fn", "stream_weights", "stream_channels"
        )
        found[f"{prefix}.base"] = Replicated(f"{file}_base", "stream_weights")
        found[f"{prefix}.scale"] = Replicated(f"{file}_scale", "stream_scales")
    return found


def _compressor(own: str, file: str, dim: str) -> dict[str, Mapping]:
    return {
        f"{own}.kv_weight": OfEntries(f"{file}.wkv.weight", dim),
        f"{own}.gate_weight": OfEntries(f"{file}.wgate.weight", dim),
        f"{own}.position_bias": OfEntries(f"{file}.ape", dim, bias=True),
        f"{own}.norm_weight": Replicated(f"{file}.norm.weight", dim),
    }


PARAMETERS: dict[str, Mapping] = {
    EMBEDDING: VocabParallel("embed.weight"),
    f"{LAYER}.input_layernorm.weight": Replicated(f"{HF_LAYER}.attn_norm.weight"),
    f"{ATTENTION}.query_down_weight": ReplicatedMatrix(f"{HF_ATTENTION}.wq_a.weight", "q_latent"),
    f"{ATTENTION}.query_norm_weight": Replicated(f"{HF_ATTENTION}.q_norm.weight", "q_latent"),
    f"{ATTENTION}.linear_q_up_proj.weight": ColumnParallel(
        f"{HF_ATTENTION}.wq_b.weight", "query", "q_latent"
    ),
    f"{ATTENTION}.kv_weight": ReplicatedMatrix(f"{HF_ATTENTION}.wkv.weight", "head_dim"),
    f"{ATTENTION}.kv_norm_weight": Replicated(f"{HF_ATTENTION}.kv_norm.weight", "head_dim"),
    f"{ATTENTION}.core_attention.softmax_offset": HeadParallel(f"{HF_ATTENTION}.attn_sink"),
    **_compressor(f"{ATTENTION}.compressor", f"{HF_ATTENTION}.compressor", "head_dim"),
    **_compressor(
        f"{ATTENTION}.indexer.compressor", f"{HF_ATTENTION}.indexer.compressor", "index_dim"
    ),
    f"{ATTENTION}.indexer.wq_b": ReplicatedMatrix(
        f"{HF_ATTENTION}.indexer.wq_b.weight", "index_query", "q_latent"
    ),
    f"{ATTENTION}.indexer.weights_proj": ReplicatedMatrix(
        f"{HF_ATTENTION}.indexer.weights_proj.weight", "index_heads"
    ),
    f"{ATTENTION}.output_weight": ByGroups(
        f"{HF_ATTENTION}.wo_a.weight", "grouped_output", "query_of_group"
    ),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{HF_ATTENTION}.wo_b.weight", "grouped_output"),
    f"{LAYER}.pre_mlp_layernorm.weight": Replicated(f"{HF_LAYER}.ffn_norm.weight"),
    f"{MLP}.router.weight": ReplicatedRows(f"{HF_EXPERTS}.gate.weight", "experts"),
    f"{MLP}.router.expert_bias": Replicated(f"{HF_EXPERTS}.gate.bias", "experts"),
    f"{MLP}.router.token_experts": TokenExperts(f"{HF_EXPERTS}.gate.tid2eid"),
    f"{EXPERT}.linear_fc1.weight": GatedMLP(
        f"{HF_EXPERTS}.experts.{{expert}}.w1.weight",
        f"{HF_EXPERTS}.experts.{{expert}}.w3.weight",
        "expert_ffn",
    ),
    f"{EXPERT}.linear_fc2.weight": RowParallel(
        f"{HF_EXPERTS}.experts.{{expert}}.w2.weight", "expert_ffn"
    ),
    f"{MLP}.shared_experts.linear_fc1.weight": GatedMLP(
        f"{HF_EXPERTS}.shared_experts.w1.weight",
        f"{HF_EXPERTS}.shared_experts.w3.weight",
        "shared_ffn",
    ),
    f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(
        f"{HF_EXPERTS}.shared_experts.w2.weight", "shared_ffn"
    ),
    **hyper_parameters(HF_LAYER),
    f"{FINAL}.sum_weight": ReplicatedMatrix("hc_head_fn", "streams", "stream_channels"),
    f"{FINAL}.sum_base": Replicated("hc_head_base", "streams"),
    f"{FINAL}.sum_scale": Replicated("hc_head_scale", "one"),
    f"{FINAL}.weight": Replicated("norm.weight"),
    OUTPUT_LAYER: VocabParallel("head.weight"),
}


def published_name(name: str) -> str:
    """Published name of a tensor that transformers saves under `name`, which may be the same."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    if name == "embed_tokens.weight":
        return "embed.weight"
    return name.replace(".attn.norm.", ".attn.kv_norm.")


register_model_family(
    ModelFamily(
        DEEPSEEK_V4,
        "deepseek_v4",
        PARAMETERS,
        required=(
            *("head_dim", "q_lora_rank", "o_lora_rank", "index_n_heads", "index_head_dim"),
            *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
        ),
        keys=frozenset(KEYS),
        meant=_meant,
        defaults=DEFAULTS,
        derived=_derived,
        settings=_settings,
        layer_types=frozenset({WINDOW, SPARSE, HEAVY}),
        rotary=False,  # that of the whole network
        untrained_prefixes=("mtp.",),
        unused_weights=_tables,
        published=("DeepSeek-V4",),
        tiny={
            **{"head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 20, "o_groups": 2},
            **{"o_lora_rank": 10, "index_n_heads": 12, "index_head_dim": 14, "index_topk": 4},
            **{"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3},
            **{"n_shared_experts": 1, "routed_scaling_factor": 1.7, "swiglu_limit": 0.4},
            **{"hc_mult": 3, "hc_sinkhorn_iters": 5, "rms_norm_eps": 1e-4, "sliding_window": 6},
            **{"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
            "compress_rates": {SPARSE: 3, HEAVY: 7},
            "layer_types": (SPARSE, HEAVY, WINDOW),
            "mlp_layer_types": (HASHED, SCORED),
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
                "original_max_position_embeddings": 16,
            },
        },
    )
)
