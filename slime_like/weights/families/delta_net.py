"""Qwen3-Next and Qwen3.5: gated delta nets (megatron/model/delta_net.py) in most layers, the others
have attention with an output gate; partial rotary embedding, zero-centered norms.

Tensor-parallel ranks hold complete groups (the value heads that share one key head), so the rows of
a delta net's input projection, and its convolution channels, are ordered by group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from slime_like.weights.families import qwen3
from slime_like.weights.families.base import ATTENTION, HF_ATTENTION, ConfigReader
from slime_like.weights.mappings import (
    GatedQKV,
    Mapping,
    Replicated,
    RowParallel,
    Sizes,
    TensorPart,
    shard_bounds,
)

HF_DELTA = "model.layers.{layer}.linear_attn"
# keys of config.json, and fields of TransformerConfig
SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
LAYER_TYPES = frozenset({"linear_attention", "full_attention"})
KEYS = frozenset({*SIZES, "full_attention_interval", "attn_output_gate", "mamba_ssm_dtype"})
TINY = {
    **{"head_dim": 16, "full_attention_interval": 2, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 5},
}
REQUIRED = ("num_key_value_heads", "head_dim", *SIZES)


def quarter_rotary(reader: ConfigReader) -> float:
    """Rotary share of files without `partial_rotary_factor`."""
    return 0.25


def delta_settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    sizes = {key: reader.number(key) for key in SIZES}
    groups = sizes["linear_num_key_heads"]
    heads = sizes["linear_num_value_heads"]
    if heads % groups:
        reader.refuse(
            f"linear_num_key_heads {groups} does not divide linear_num_value_heads {heads}"
        )
    if reader.config.get("attn_output_gate") is False:
        reader.refuse("attn_output_gate False is not supported with this architecture")
    return {
        **sizes,
        "linear_attention_freq": _linear_layers(reader),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def _linear_layers(reader: ConfigReader) -> list[int]:
    """Pattern of layers: 1 for a delta net, 0 for attention."""
    layers = reader.number("num_hidden_layers")
    kinds = reader.config.get("layer_types")
    if kinds is None:
        every = reader.number("full_attention_interval", default=4)
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(kinds) != layers:
        reader.refuse(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    return [int(kind == "linear_attention") for kind in kinds]


@dataclass(frozen=True)
class ByGroup(Mapping):
    """A delta-net tensor sharded by groups: a rank has the rows of its groups, group after
    group."""

    @abstractmethod
    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        """The rows of one group."""

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        groups = range(*shard_bounds(sizes.delta_groups, tp_rank, tp_size))
        return list(chain.from_iterable(self.group(sizes, group) for group in groups))


def heads_of_group(sizes: Sizes) -> int:
    return sizes.delta_heads // sizes.delta_groups


def group_rows(hf: str, start: int, size: int, group: int) -> TensorPart:
    """Rows of one group in a section that starts at row `start`."""
    return TensorPart(hf, start + group * size, start + (group + 1) * size)


def _query_key_value(hf: str, sizes: Sizes, group: int) -> Iterator[TensorPart]:
    """Rows of one group in a tensor with all queries, then all keys, then all values."""
    keys = sizes.delta_groups * sizes.delta_key
    yield group_rows(hf, 0, sizes.delta_key, group)
    yield group_rows(hf, keys, sizes.delta_key, group)
    yield group_rows(hf, 2 * keys, heads_of_group(sizes) * sizes.delta_value, group)


def _all_query_key_value(sizes: Sizes) -> int:
    return 2 * sizes.delta_groups * sizes.delta_key + sizes.delta_output


@dataclass(frozen=True)
class DeltaProjection(ByGroup):
    """Input projection of a delta net: query, key, values, gates, rates and decays of each group.
    The file has the first four in one tensor and the last two in another, already in this order."""

    qkvz: str
    ba: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = _all_query_key_value(sizes) + sizes.delta_output
        return {
            self.qkvz: (rows, sizes.hidden),
            self.ba: (2 * sizes.delta_heads, sizes.hidden),
        }

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        rows = _all_query_key_value(sizes) + sizes.delta_output
        yield group_rows(self.qkvz, 0, rows // sizes.delta_groups, group)
        yield group_rows(self.ba, 0, 2 * heads_of_group(sizes), group)


@dataclass(frozen=True)
class DeltaProjections(ByGroup):
    """Like `DeltaProjection`, for files with one tensor for queries, keys and values and one tensor
    each for gates, rates and decays."""

    qkv: str
    z: str
    b: str
    a: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = {
            self.qkv: _all_query_key_value(sizes),
            self.z: sizes.delta_output,
            self.b: sizes.delta_heads,
            self.a: sizes.delta_heads,
        }
        return {name: (size, sizes.hidden) for name, size in rows.items()}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        heads = heads_of_group(sizes)
        yield from _query_key_value(self.qkv, sizes, group)
        yield group_rows(self.z, 0, heads * sizes.delta_value, group)
        yield group_rows(self.b, 0, heads, group)
        yield group_rows(self.a, 0, heads, group)


@dataclass(frozen=True)
class DeltaConv(ByGroup):
    """Convolution weight [channels, 1, taps]."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (_all_query_key_value(sizes), 1, sizes.delta_taps)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        yield from _query_key_value(self.hf, sizes, group)


@dataclass(frozen=True)
class PerValueHead(ByGroup):
    """A vector with one number per value head."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.delta_heads,)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        yield group_rows(self.hf, 0, heads_of_group(sizes), group)


def delta_parameters(projection: Mapping) -> dict[str, Mapping]:
    """Parameters of all layers except their MLPs. projection: mapping of the delta net's input
    projection."""
    return {
        **qwen3.PARAMETERS,
        f"{ATTENTION}.linear_qkv.weight": GatedQKV(
            f"{HF_ATTENTION}.q_proj.weight",
            f"{HF_ATTENTION}.k_proj.weight",
            f"{HF_ATTENTION}.v_proj.weight",
        ),
        f"{ATTENTION}.in_proj.weight": projection,
        f"{ATTENTION}.conv_weight": DeltaConv(f"{HF_DELTA}.conv1d.weight"),
        f"{ATTENTION}.A_log": PerValueHead(f"{HF_DELTA}.A_log"),
        f"{ATTENTION}.dt_bias": PerValueHead(f"{HF_DELTA}.dt_bias"),
        f"{ATTENTION}.norm_weight": Replicated(f"{HF_DELTA}.norm.weight", "delta_value"),
        f"{ATTENTION}.out_proj.weight": RowParallel(f"{HF_DELTA}.out_proj.weight", "delta_output"),
    }
