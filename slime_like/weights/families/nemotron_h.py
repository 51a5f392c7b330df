"""Nemotron-H and Nemotron 3: layers of one block each, Mamba-2 (megatron/model/mamba.py), attention
without position embedding, an MLP with squared ReLU, or DeepSeek-V3's routing to such MLPs,
in Nemotron-3-Super on a projection of the hidden state.

The published file has the blocks as letters in `hybrid_override_pattern`; transformers 5 saves
their names in `layers_block_type`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as MappingOf
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
from slime_like.weights.families.delta_net import ByGroup, PerValueHead, group_rows, heads_of_group
from slime_like.weights.families.experts import EXPERT, WITHOUT_EFFECT
from slime_like.weights.families.sigmoid_experts import sigmoid_experts
from slime_like.weights.mappings import (
    QKV,
    ColumnParallel,
    Mapping,
    Replicated,
    ReplicatedRows,
    RowParallel,
    Sizes,
    TensorPart,
    VocabParallel,
)

NEMOTRON_H = "NemotronHForCausalLM"
BLOCKS = "layers_block_type"
PATTERN = "hybrid_override_pattern"
# name of a block, in files of transformers 5 and of older releases -> its letter
LETTERS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "attention": "*"},
}
# our key of the groups -> the file's
SIZES = {
    "linear_num_key_heads": "n_groups",
    "linear_num_value_heads": "mamba_num_heads",
    "linear_key_head_dim": "ssm_state_size",
    "linear_value_head_dim": "mamba_head_dim",
    "linear_conv_kernel_dim": "conv_kernel",
}
EXPERT_KEYS = frozenset(
    {
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        *("moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob"),
        *("routed_scaling_factor", "moe_shared_expert_overlap", "moe_latent_size"),
    }
)
FIXED = {
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "use_conv_bias": True,
    "tie_word_embeddings": False,  # transformers never ties them
}
# of prediction layers, initialisation, generation and kernels. transformers bounds step sizes by
# `time_step_min` and not by `time_step_limit`
UNUSED = WITHOUT_EFFECT | {
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_nextn_predict_layers"),
    *("time_step_max", "time_step_limit", "time_step_floor", "rescale_prenorm_residual", "expand"),
    *("num_logits_to_keep", "chunk_size", "mamba_ssm_cache_dtype", "use_mamba_kernels", "norm_eps"),
}


def _pattern(config: MappingOf[str, Any]) -> str | None:
    """A letter per layer, "?" for an unknown name; None if the file does not say."""
    names = config.get(BLOCKS)
    if names is not None:
        return "".join(LETTERS.get(name, "?") for name in names)
    pattern = config.get(PATTERN)
    return None if pattern is None else str(pattern)


def _number_of_layers(config: MappingOf[str, Any]) -> dict[str, object]:
    """transformers 5 does not save it."""
    pattern = _pattern(config)
    return {} if pattern is None else {"num_hidden_layers": len(pattern)}


def nemotron_settings(reader: ConfigReader) -> dict[str, object]:
    """Fields of TransformerConfig. Reports unsupported settings to the reader."""
    require_values(reader, FIXED)
    sizes = {ours: reader.number(theirs) for ours, theirs in SIZES.items()}
    groups = sizes["linear_num_key_heads"]
    heads = sizes["linear_num_value_heads"]
    if heads % groups:
        reader.refuse(f"n_groups {groups} does not divide mamba_num_heads {heads}")
    layers = reader.number("num_hidden_layers")
    pattern = _pattern(reader.config)
    if pattern is None:
        reader.refuse(f"{BLOCKS} or {PATTERN} is missing")
    elif unknown := sorted(set(pattern) - set(LETTERS.values())):
        reader.refuse(
            f"{BLOCKS} or {PATTERN} has unknown blocks ({', '.join(unknown)}); legal values: "
            f"{', '.join(LETTERS)}, or a letter of M*-E"
        )
    elif len(pattern) != layers:
        reader.refuse(
            f"{BLOCKS} or {PATTERN} has {len(pattern)} layers for num_hidden_layers {layers}"
        )
    pattern = pattern or "M" * layers
    settings: dict[str, object] = {
        **sizes,
        "block_pattern": pattern,
        "mamba_smallest_step": float(reader.number("time_step_min", 1e-3, whole=False)),
        "linear_attention_freq": [int(letter == "M") for letter in pattern],
        "layernorm_epsilon": reader.number("layer_norm_epsilon", 1e-5, whole=False),
        "gated_linear_unit": False,
        "activation_func": "squared_relu",
    }
    latent = reader.config.get("moe_latent_size") is not None
    if "E" not in pattern:
        return settings
    return {
        **settings,
        **sigmoid_experts(reader),
        "moe_layer_freq": [int(letter == "E") for letter in pattern],
        "moe_shared_expert_intermediate_size": reader.number("moe_shared_expert_intermediate_size"),
        "moe_latent_size": reader.number("moe_latent_size") if latent else None,
    }


def _channels(hf: str, sizes: Sizes, start: int, group: int) -> Iterator[TensorPart]:
    """C, B and x of one group, in a tensor with all of x, then of B, then of C, from row
    `start`."""
    states = sizes.delta_groups * sizes.delta_key
    inner = sizes.delta_output
    yield group_rows(hf, start + inner + states, sizes.delta_key, group)
    yield group_rows(hf, start + inner, sizes.delta_key, group)
    yield group_rows(hf, start, inner // sizes.delta_groups, group)


def _all_channels(sizes: Sizes) -> int:
    return sizes.delta_output + 2 * sizes.delta_groups * sizes.delta_key


@dataclass(frozen=True)
class MambaProjection(ByGroup):
    """Input projection of Mamba-2: gates, C, B, x and step sizes of each group. The file has all
    gates, then x, B, C and step sizes."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = sizes.delta_output + _all_channels(sizes) + sizes.delta_heads
        return {self.hf: (rows, sizes.hidden)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        inner = sizes.delta_output
        yield group_rows(self.hf, 0, inner // sizes.delta_groups, group)
        yield from _channels(self.hf, sizes, inner, group)
        yield group_rows(self.hf, inner + _all_channels(sizes), heads_of_group(sizes), group)


@dataclass(frozen=True)
class MambaConv(ByGroup):
    """Convolution weight [channels, 1, taps]."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (_all_channels(sizes), 1, sizes.delta_taps)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        yield from _channels(self.hf, sizes, 0, group)


@dataclass(frozen=True)
class MambaConvBias(MambaConv):
    """Convolution bias [channels]."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (_all_channels(sizes),)}


@dataclass(frozen=True)
class PerValue(ByGroup):
    """A vector with one number per channel of each head: the norm's weight."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.delta_output,)}

    def group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        yield group_rows(self.hf, 0, sizes.delta_output // sizes.delta_groups, group)


def mamba_parameters(mixer: str) -> dict[str, Mapping]:
    """Parameters of Mamba-2. mixer: its name in the file."""
    return {
        f"{ATTENTION}.in_proj.weight": MambaProjection(f"{mixer}.in_proj.weight"),
        f"{ATTENTION}.conv_weight": MambaConv(f"{mixer}.conv1d.weight"),
        f"{ATTENTION}.conv_bias": MambaConvBias(f"{mixer}.conv1d.bias"),
        f"{ATTENTION}.A_log": PerValueHead(f"{mixer}.A_log"),
        f"{ATTENTION}.D": PerValueHead(f"{mixer}.D"),
        f"{ATTENTION}.dt_bias": PerValueHead(f"{mixer}.dt_bias"),
        f"{ATTENTION}.norm_weight": PerValue(f"{mixer}.norm.weight"),
        f"{ATTENTION}.out_proj.weight": RowParallel(f"{mixer}.out_proj.weight", "delta_output"),
    }


LAYER = "backbone.layers.{layer}"
MIXER = f"{LAYER}.mixer"
PARAMETERS: dict[str, Mapping] = {
    EMBEDDING: VocabParallel("backbone.embeddings.weight"),
    "decoder.layers.{layer}.input_layernorm.weight": Replicated(f"{LAYER}.norm.weight"),
    **mamba_parameters(MIXER),
    f"{ATTENTION}.linear_qkv.weight": QKV(
        f"{MIXER}.q_proj.weight", f"{MIXER}.k_proj.weight", f"{MIXER}.v_proj.weight"
    ),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{MIXER}.o_proj.weight", "query"),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated(f"{LAYER}.norm.weight"),
    f"{MLP}.linear_fc1.weight": ColumnParallel(f"{MIXER}.up_proj.weight", "ffn"),
    f"{MLP}.linear_fc2.weight": RowParallel(f"{MIXER}.down_proj.weight", "ffn"),
    f"{MLP}.router.weight": ReplicatedRows(f"{MIXER}.gate.weight", "experts"),
    f"{MLP}.router.expert_bias": Replicated(f"{MIXER}.gate.e_score_correction_bias", "experts"),
    f"{EXPERT}.linear_fc1.weight": ColumnParallel(
        f"{MIXER}.experts.{{expert}}.up_proj.weight", "expert_ffn", "expert_hidden"
    ),
    f"{EXPERT}.linear_fc2.weight": RowParallel(
        f"{MIXER}.experts.{{expert}}.down_proj.weight", "expert_ffn", "expert_hidden"
    ),
    f"{MLP}.fc1_latent_proj.weight": ReplicatedRows(
        f"{MIXER}.fc1_latent_proj.weight", "expert_hidden"
    ),
    f"{MLP}.fc2_latent_proj.weight": ReplicatedRows(
        f"{MIXER}.fc2_latent_proj.weight", "hidden", "expert_hidden"
    ),
    f"{MLP}.shared_experts.linear_fc1.weight": ColumnParallel(
        f"{MIXER}.shared_experts.up_proj.weight", "shared_ffn"
    ),
    f"{MLP}.shared_experts.linear_fc2.weight": RowParallel(
        f"{MIXER}.shared_experts.down_proj.weight", "shared_ffn"
    ),
    "decoder.final_layernorm.weight": Replicated("backbone.norm_f.weight"),
    OUTPUT_LAYER: VocabParallel(LM_HEAD),
}

register_model_family(
    ModelFamily(
        NEMOTRON_H,
        "nemotron_h",
        PARAMETERS,
        required=("num_key_value_heads", "head_dim", *SIZES.values()),
        keys=frozenset(
            {BLOCKS, PATTERN, *SIZES.values(), *FIXED, "time_step_min", "layer_norm_epsilon"}
        )
        | EXPERT_KEYS
        | UNUSED,
        defaults={"max_position_embeddings": 4096},
        derived=_number_of_layers,
        rotary=False,
        settings=nemotron_settings,
        untrained_prefixes=("mtp.",),
        published=("NVIDIA-Nemotron-3", "Nemotron-3", "NVIDIA-Nemotron-Nano", "Nemotron-H"),
        tiny={
            **{"head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 5},
            **{"n_groups": 4, "conv_kernel": 4, "n_routed_experts": 8, "num_experts_per_tok": 4},
            **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
            "layer_types": ("linear_attention", "moe", "full_attention", "mlp"),
        },
    )
)
