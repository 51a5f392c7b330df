"""Kimi-Linear: Kimi delta attention in most layers (megatron/model/kimi_delta.py), latent attention
without rotary embedding in the others, and DeepSeek-V3's experts under other names.

The published file describes the layers in `linear_attn_config`, by numbers from 1; transformers 5
saves `layer_types` and flat keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_like.weights.families import deepseek_v3, llama
from slime_like.weights.families.base import (
    ATTENTION,
    HF_ATTENTION,
    MLP,
    ConfigReader,
    ModelFamily,
    register_model_family,
    require_values,
)
from slime_like.weights.families.delta_net import (
    LAYER_TYPES,
    ByGroup,
    PerValueHead,
    group_rows,
)
from slime_like.weights.families.experts import expert_parameters, shared_expert_parameters
from slime_like.weights.families.sigmoid_experts import TINY as TINY_EXPERTS
from slime_like.weights.families.sigmoid_experts import untrained_layers
from slime_like.weights.mappings import Mapping, Replicated, RowParallel, Sizes, TensorPart

KIMI_LINEAR = "KimiLinearForCausalLM"
# transformers 5.24 saves dense layers under the name of those with experts
_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")
MOE = "model.layers.{layer}.block_sparse_moe"
LAYERS = "linear_attn_config"
LAYER_LISTS = ("kda_layers", "full_attn_layers")  # keys within it
# our key of the delta nets -> name within `linear_attn_config`
DELTA_NETS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
# key of DeepSeek-V3 -> Kimi-Linear's
NAMES = {
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "max_position_embeddings": "model_max_length",
}
DEFAULTS = {
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "routed_scaling_factor": 2.446},
    "first_k_dense_replace": 1,
}
FIXED = {
    "mla_use_nope": True,
    "use_grouped_topk": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "tie_word_embeddings": False,  # transformers never ties them
}


def published_name(name: str) -> str:
    """The published files' name of a tensor that transformers saved."""
    return _DENSE.sub(r".mlp.\1", name)


def kimi_settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, FIXED)
    return {
        **deepseek_v3.deepseek_settings(reader),
        "latent_unrotated": True,
        **delta_settings(reader),
    }


def delta_settings(reader: ConfigReader) -> dict[str, Any]:
    """Fields of TransformerConfig about delta nets. Reports unsupported settings to the reader."""
    nested = reader.config.get(LAYERS) or {}
    for key in nested.keys() - {*DELTA_NETS.values(), *LAYER_LISTS}:
        reader.refuse(f"{LAYERS} {key} {nested[key]!r} is unknown and might change the network")
    reader.config |= {
        key: nested[name] for key, name in DELTA_NETS.items() if nested.get(name) is not None
    }
    heads = reader.number("linear_num_heads")
    size = reader.number("linear_head_dim")
    return {
        "linear_attention_freq": linear_layers(reader),
        "linear_decay_per_channel": True,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": reader.number("linear_conv_kernel_dim"),
    }


def linear_layers(reader: ConfigReader) -> list[int]:
    """Pattern of layers: 1 for a delta net, 0 for attention."""
    layers = reader.number("num_hidden_layers")
    nested = reader.config.get(LAYERS) or {}
    linear, full = (nested.get(key) for key in LAYER_LISTS)
    if linear is not None and full is not None:
        if sorted([*linear, *full]) != list(range(1, layers + 1)):
            reader.refuse(
                f"{LAYERS} must have each of the layers 1 to {layers} once in kda_layers or "
                "full_attn_layers"
            )
        return [int(layer in linear) for layer in range(1, layers + 1)]
    kinds = reader.config.get("layer_types")
    if kinds is None:
        reader.refuse(f"layer_types is missing, or {LAYERS} with kda_layers and full_attn_layers")
        return [1] * layers
    if len(kinds) != layers:
        reader.refuse(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    return [int(kind == "linear_attention") for kind in kinds]


@dataclass(frozen=True)
class OfHeads(ByGroup):
    """Tensors of which a rank has, head after head, the rows of its heads in each."""

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        for name, shape in self.hf_shapes(sizes).items():
            yield group_rows(name, 0, shape[0] // sizes.delta_heads, group)


@dataclass(frozen=True)
class KimiProjection(OfHeads):
    """Query, key, value and rate of each head."""

    q: str
    k: str
    v: str
    b: str
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        wide = {name: (sizes.delta_output, sizes.hidden) for name in (self.q, self.k, self.v)}
        return {**wide, self.b: (sizes.delta_heads, sizes.hidden)}


@dataclass(frozen=True)
class KimiConv(OfHeads):
    """Convolution weights of query, key and value [channels, 1, taps]."""

    q: str
    k: str
    v: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        shape = (sizes.delta_output, 1, sizes.delta_taps)
        return dict.fromkeys((self.q, self.k, self.v), shape)


@dataclass(frozen=True)
class UpProjection(OfHeads):
    """Second factor of a projection of low rank, [heads * head dimension, head dimension]."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.delta_output, sizes.delta_value)}


@dataclass(frozen=True)
class PerChannel(OfHeads):
    """A vector with one number per channel of each head."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.delta_output,)}


@dataclass(frozen=True)
class PerHeadOfFour(PerValueHead):
    """One number per head, [1, 1, heads, 1] in the file."""

    flat: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (1, 1, sizes.delta_heads, 1)}


@dataclass(frozen=True)
class DownProjections(Mapping):
    """First factors of two projections of low rank, of decays and of gates, stacked."""

    decay: str
    gate: str
    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys((self.decay, self.gate), (sizes.delta_value, sizes.hidden))

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(name, 0, sizes.delta_value) for name in (self.decay, self.gate)]


def _hf(name: str) -> str:
    return f"{HF_ATTENTION}.{name}"


DELTA_PARAMETERS: dict[str, Mapping] = {
    f"{ATTENTION}.in_proj.weight": KimiProjection(
        *(_hf(f"{name}_proj.weight") for name in ("q", "k", "v", "b"))
    ),
    f"{ATTENTION}.conv_weight": KimiConv(
        *(_hf(f"{name}_conv1d.weight") for name in ("q", "k", "v"))
    ),
    f"{ATTENTION}.A_log": PerHeadOfFour(_hf("A_log")),
    f"{ATTENTION}.dt_bias": PerChannel(_hf("dt_bias")),
    f"{ATTENTION}.low_rank_weight": DownProjections(_hf("f_a_proj.weight"), _hf("g_a_proj.weight")),
    f"{ATTENTION}.decay_weight": UpProjection(_hf("f_b_proj.weight")),
    f"{ATTENTION}.gate_weight": UpProjection(_hf("g_b_proj.weight")),
    f"{ATTENTION}.norm_weight": Replicated(_hf("o_norm.weight"), "delta_value"),
    f"{ATTENTION}.out_proj.weight": RowParallel(_hf("o_proj.weight"), "delta_output"),
}
PARAMETERS: dict[str, Mapping] = {
    **{name: m for name, m in deepseek_v3.PARAMETERS.items() if ".mlp." not in name},
    **{name: m for name, m in llama.PARAMETERS.items() if name.startswith(MLP)},
    **expert_parameters(MOE, "w1", "w3", "w2"),
    f"{MLP}.router.expert_bias": Replicated(f"{MOE}.gate.e_score_correction_bias", "experts"),
    **shared_expert_parameters(f"{MOE}.shared_experts"),
    **DELTA_PARAMETERS,
}

register_model_family(
    ModelFamily(
        KIMI_LINEAR,
        "kimi_linear",
        PARAMETERS,
        required=(
            *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("num_experts", "num_experts_per_token"),
        ),
        keys=deepseek_v3.KEYS | {*NAMES.values(), *DELTA_NETS, *FIXED, LAYERS},
        settings=kimi_settings,
        stand_ins={"head_dim": "qk_rope_head_dim", **NAMES},
        defaults=DEFAULTS,
        untrained_layers=untrained_layers,
        layer_types=LAYER_TYPES,
        published=("Kimi-Linear",),
        tiny={
            **{k: v for k, v in TINY_EXPERTS.items() if k not in {*NAMES, "norm_topk_prob"}},
            **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
            **{"num_experts": 8, "num_experts_per_token": 4, "num_shared_experts": 2},
            **{"moe_renormalize": True, "num_expert_group": 4, "topk_group": 2},
            **{"linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 4},
            "layer_types": ("linear_attention", "full_attention"),
        },
    )
)
