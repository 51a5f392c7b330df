"""LFM2 and LFM2-MoE: gated short convolutions (megatron/model/short_conv.py) in most layers, in the
others attention with norms of queries and keys. The MoE model has sigmoid routing with an expert
bias and dense first layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_like.weights.families.base import (
    ATTENTION,
    EMBEDDING,
    LM_HEAD,
    MLP,
    OUTPUT_LAYER,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.delta_net import ByGroup, group_rows
from slime_like.weights.families.experts import WITHOUT_EFFECT, expert_parameters
from slime_like.weights.mappings import (
    QKV,
    GatedMLP,
    Mapping,
    Replicated,
    RowParallel,
    Sizes,
    TensorPart,
    VocabParallel,
)

HF_LAYER = "model.layers.{layer}"
HF_CONV = f"{HF_LAYER}.conv"
HF_MLP = f"{HF_LAYER}.feed_forward"
HF_ATTENTION = f"{HF_LAYER}.self_attn"
ROUTER_EPSILON = 1e-6  # added to the sum by which the selected experts' weights are divided


@dataclass(frozen=True)
class ConvProjection(ByGroup):
    """Input projection of a short convolution: b, c and x of each group. The file has all b, all c,
    then all x."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (3 * sizes.delta_output, sizes.hidden)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        for part in range(3):
            yield group_rows(self.hf, part * sizes.delta_output, sizes.delta_value, group)


@dataclass(frozen=True)
class ConvTaps(ByGroup):
    """Convolution weight [channels, 1, taps]."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.delta_output, 1, sizes.delta_taps)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        yield group_rows(self.hf, 0, sizes.delta_value, group)


PARAMETERS: dict[str, Mapping] = {
    EMBEDDING: VocabParallel("model.embed_tokens.weight"),
    "decoder.layers.{layer}.input_layernorm.weight": Replicated(f"{HF_LAYER}.operator_norm.weight"),
    f"{ATTENTION}.in_proj.weight": ConvProjection(f"{HF_CONV}.in_proj.weight"),
    f"{ATTENTION}.conv_weight": ConvTaps(f"{HF_CONV}.conv.weight"),
    f"{ATTENTION}.out_proj.weight": RowParallel(f"{HF_CONV}.out_proj.weight", "delta_output"),
    f"{ATTENTION}.linear_qkv.weight": QKV(
        f"{HF_ATTENTION}.q_proj.weight",
        f"{HF_ATTENTION}.k_proj.weight",
        f"{HF_ATTENTION}.v_proj.weight",
    ),
    f"{ATTENTION}.q_layernorm.weight": Replicated(f"{HF_ATTENTION}.q_layernorm.weight", "head_dim"),
    f"{ATTENTION}.k_layernorm.weight": Replicated(f"{HF_ATTENTION}.k_layernorm.weight", "head_dim"),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{HF_ATTENTION}.out_proj.weight", "query"),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated(f"{HF_LAYER}.ffn_norm.weight"),
    f"{MLP}.linear_fc1.weight": GatedMLP(f"{HF_MLP}.w1.weight", f"{HF_MLP}.w3.weight"),
    f"{MLP}.linear_fc2.weight": RowParallel(f"{HF_MLP}.w2.weight", "ffn"),
    "decoder.final_layernorm.weight": Replicated("model.embedding_norm.weight"),
    OUTPUT_LAYER: VocabParallel(LM_HEAD),
}
KEYS = frozenset({"norm_eps", "conv_bias", "conv_L_cache", "full_attn_idxs", "tie_embedding"})
ADJUSTED = "block_auto_adjust_ff_dim"
# of the MLP's size; and what older files repeat, or have for initialisation
DENSE_KEYS = {
    *("block_ff_dim", ADJUSTED, "block_multiple_of", "block_ffn_dim_multiplier"),
    *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
    *("conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"),
}
EXPERT_KEYS = WITHOUT_EFFECT | {
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers"),
    *("norm_topk_prob", "routed_scaling_factor", "use_expert_bias"),
}
TINY = {
    **{"conv_L_cache": 3, "norm_eps": 1e-5, "tie_word_embeddings": True},
    "layer_types": ("conv", "full_attention"),
}


def _meant(config: dict[str, Any]) -> dict[str, Any]:
    """Keys under the names of other families; `layer_types` from the numbers of layers with
    attention, of which all are if there are none."""
    config = dict(config)
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is None and isinstance(layers, int):
        attention = config.get("full_attn_idxs")
        attention = range(layers) if attention is None else attention
        config["layer_types"] = [
            "full_attention" if n in attention else "conv" for n in range(layers)
        ]
    tied = config.get("tie_embedding")
    if tied is not None or config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = True if tied is None else tied
    config["rms_norm_eps"] = config.get("norm_eps") or 1e-5
    if config.get("block_ff_dim") is not None:
        config["intermediate_size"] = config["block_ff_dim"]
    return config


def _conv_settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of a ShortConvConfig: a group of channels for each head of attention."""
    require_values(reader, {"conv_bias": False})
    kinds = reader.config["layer_types"]
    layers = reader.number("num_hidden_layers")
    if len(kinds) != layers:
        reader.refuse(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    groups = reader.number("num_attention_heads")
    width = reader.number("hidden_size") // groups
    return {
        "short_conv": True,
        "linear_attention_freq": [int(kind == "conv") for kind in kinds],
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": reader.number("conv_L_cache", default=3),
    }


def _settings(reader: ConfigReader) -> dict[str, object]:
    return {**_conv_settings(reader), "ffn_hidden_size": _inner_size(reader)}


def _inner_size(reader: ConfigReader) -> int:
    """Of the MLP: two thirds of `intermediate_size`, times a factor, rounded up to a multiple,
    unless the file says otherwise."""
    inner = int(reader.number("intermediate_size"))
    if not reader.config.get(ADJUSTED, True):
        return inner
    inner = int(2 * inner / 3)
    inner = int(reader.number("block_ffn_dim_multiplier", default=1.0, whole=False) * inner)
    multiple = int(reader.number("block_multiple_of", default=256))
    return -(-inner // multiple) * multiple


def _moe_settings(reader: ConfigReader) -> dict[str, object]:
    require_values(reader, {"norm_topk_prob": True, "use_expert_bias": True})
    layers = reader.number("num_hidden_layers")
    dense = reader.config.get("num_dense_layers", 2)
    experts = reader.number("num_experts")
    topk = reader.number("num_experts_per_tok", default=4)
    if not 1 < topk <= experts:
        reader.refuse(f"num_experts_per_tok {topk} must be 2 to num_experts {experts}")
    if not isinstance(dense, int) or not 0 <= dense < layers:
        reader.refuse(f"num_dense_layers {dense!r} leaves no layer with experts")
        dense = 0
    scaling = reader.number("routed_scaling_factor", default=1.0, whole=False)
    return {
        **_conv_settings(reader),
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": reader.number("moe_intermediate_size"),
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        "moe_router_pre_softmax": True,  # there is no softmax
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(scaling),
        "moe_router_load_balancing_type": "none",
        "router_epsilon": ROUTER_EPSILON,
    }


register_model_family(
    ModelFamily(
        "Lfm2ForCausalLM",
        "lfm2",
        PARAMETERS,
        required=("num_key_value_heads",),
        keys=KEYS | DENSE_KEYS,
        qk_norm=True,
        meant=_meant,
        defaults={"max_position_embeddings": 128000},
        settings=_settings,
        layer_types=frozenset({"conv", "full_attention"}),
        rope_theta=1e6,
        published=("LFM2-350M", "LFM2-700M", "LFM2-1.2B", "LFM2-2.6B", "LFM2.5-1.2B"),
        tiny={**TINY, ADJUSTED: True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3},
    )
)
register_model_family(
    ModelFamily(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **PARAMETERS,
            **expert_parameters(HF_MLP, "w1", "w3", "w2"),
            f"{MLP}.router.expert_bias": Replicated(f"{HF_MLP}.expert_bias", "experts"),
        },
        required=("num_key_value_heads", "num_experts", "moe_intermediate_size"),
        keys=KEYS | EXPERT_KEYS,
        qk_norm=True,
        meant=_meant,
        defaults={"max_position_embeddings": 128000},
        settings=_moe_settings,
        layer_types=frozenset({"conv", "full_attention"}),
        rope_theta=1e6,
        published=("LFM2-8B-A1B", "LFM2-24B-A2B"),
        tiny={
            **{**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"num_dense_layers": 1, "routed_scaling_factor": 1.7},
        },
    )
)
