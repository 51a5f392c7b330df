"""The mapping of every parameter of a model, for any family.

Names are those of the layer spec without Transformer Engine; with it, the norm in front of a linear
layer is a parameter of that layer, its grouped experts are numbered parameters of one layer, and
`canonical_name` takes such names back to ours. An expert's number in a name is that of the whole
model, "{expert}" in a map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from typing import TYPE_CHECKING, Any

from torch import Tensor

from arguments.hf.moe import moe_layers
from arguments.schema import GPTModelConfig
from slime_like.images.settings import VisionSettings
from slime_like.images.tower import name_in_file, tower_shapes
from slime_like.weights.attention_sizes import layers_of
from slime_like.weights.families import EMBEDDING, OUTPUT_LAYER, ModelFamily, model_families
from slime_like.weights.families.base import ATTENTION, MLP, PredictionNames
from slime_like.weights.mappings import (
    ColumnParallel,
    Mapping,
    Replicated,
    ReplicatedRows,
    Sizes,
    Whole,
    rename_prefix,
)

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_like.megatron.parallel_layout import ParallelLayout


# Transformer Engine's layers replicate the down-projections on every tensor-parallel rank
_DOWN_PROJECTIONS = tuple(f"{ATTENTION}.linear_{part}_down_proj.weight" for part in ("q", "kv"))

# A critic's head under the names of *ForTokenClassification. *ForSequenceClassification has the
# same weight but no bias.
SCORE = "score.weight"
VALUE_HEAD: dict[str, Mapping] = {
    "output_layer.weight": ReplicatedRows(SCORE, "one"),
    "output_layer.bias": Replicated("score.bias", "one"),
}

# Norms that Transformer Engine fuses into the next linear layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
}
# Transformer Engine's grouped experts: one layer with a weight, and optionally a bias, per expert.
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")


TOWER = "vision."  # prefix of the vision tower's parameters
# without and with query compression
_QUERY_PROJECTION = (f"{ATTENTION}.linear_q_proj.weight",)
_QUERY_LATENT = tuple(
    f"{ATTENTION}.{name}.weight"
    for name in ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")
)
# optional in some families
_QKV_BIAS = f"{ATTENTION}.linear_qkv.bias"
_K_NORM = f"{ATTENTION}.k_layernorm.weight"
_QK_NORMS = (f"{ATTENTION}.q_layernorm.weight", _K_NORM)
_SINKS = f"{ATTENTION}.core_attention.softmax_offset"
_FINAL_NORM = "decoder.final_layernorm."
_EXPERT_BIAS = ".router.expert_bias"
_TOKEN_EXPERTS = ".router.token_experts"
_BUFFERS = (_EXPERT_BIAS, _TOKEN_EXPERTS, ".layer_scalar")
_INDEXER = ".self_attention.indexer."  # buffers: the indexer is not trained
_COMPRESSOR = ".self_attention.compressor."
# parts of names of a layer that is one block
_MIXER_PARTS = (".input_layernorm.", ".self_attention.")
_MLP_PARTS = (".pre_mlp_layernorm.", ".mlp.")
_SHARED_EXPERT = ".mlp.shared_experts."
_LATENT_EXPERTS = tuple(f"{MLP}.fc{number}_latent_proj.weight" for number in (1, 2))
_EXPERT_LAYERS = (
    *("router.", "experts.", "shared_experts.", "fc1_latent_proj.", "fc2_latent_proj."),
    "expert_norms.",
)
_BESIDE_MLP = (".expert_norms.", ".router.input_scale", ".router.expert_scale")
_NORM_OF_MLP = ".pre_mlp_layernorm."
_LAYER_INPUTS = ("layer_inputs.", ".layer_input.")
_MEMORY = ".ngram_memory."
_DELTA_NET = (
    *("in_proj.", "conv_weight", "A_log", "dt_bias", "norm_weight", "out_proj."),
    *("low_rank_weight", "decay_weight", "gate_weight"),  # Kimi's
    *("conv_bias", "D"),  # Mamba-2's
)


def family_map(
    architecture: str,
    config: TransformerConfig,
    *,
    tied: bool,
    value_head: bool = False,
    mtp_layers: int | None = None,
    vision: VisionSettings | None = None,
) -> dict[str, Mapping]:
    """Every parameter of the full model, in the order of the network. Layer numbers are global,
    from 0.

    Args:
        config: The model's TransformerConfig.
        tied: The output layer is the embedding. (If they are on different pipeline stages,
            megatron-core keeps a copy in the last stage's output_layer.weight.)
        value_head: The model is a critic, without an output layer.
        mtp_layers: Number of multi-token prediction layers.
        vision: The vision tower, if the model has one.

    Raises:
        ValueError: The architecture is not registered.
    """
    registered = model_families.get(architecture)
    family = _configured(registered, config)
    if tied:
        family[OUTPUT_LAYER] = family[EMBEDDING]
    per_layer = {name: mapping for name, mapping in family.items() if "{layer}" in name}
    ends = (*(name for name in family if name.startswith(_FINAL_NORM)), OUTPUT_LAYER)
    result = {} if vision is None else tower_map(vision)
    result |= {name: family[name] for name in family if name not in per_layer and name not in ends}
    experts = config.num_moe_experts or 0
    sparse_layers = moe_layers(config.moe_layer_freq if experts else None, config.num_layers)
    linear_layers = config.linear_attention_freq or [0] * config.num_layers
    shared = getattr(config, "index_shared", None) or [0] * config.num_layers
    blocks = getattr(config, "block_pattern", "")
    sized = layers_of(config)
    memory = getattr(config, "ngram_memory", None)
    for layer, (sparse, linear) in enumerate(zip(sparse_layers, linear_layers, strict=True)):
        parameters = _select_layer(per_layer, sparse=bool(sparse), linear=bool(linear))
        if sized and not sized[layer].sinks:
            parameters.pop(_SINKS, None)
        if sized and sized[layer].reads_keys:
            parameters.pop(_K_NORM, None)
        if memory is None or layer not in memory.layers:
            parameters = {n: mapping for n, mapping in parameters.items() if _MEMORY not in n}
        if hasattr(config, "entry_rates"):
            without = _not_in_layer(config, layer)
            parameters = {n: m for n, m in parameters.items() if not any(w in n for w in without)}
        if shared[layer]:
            parameters = {n: mapping for n, mapping in parameters.items() if _INDEXER not in n}
        if blocks:
            own = _MIXER_PARTS if blocks[layer] in "M*" else _MLP_PARTS
            parameters = {n: m for n, m in parameters.items() if any(part in n for part in own)}
        result |= _numbered(parameters, layer, layer, experts)
    result.update({name: family[name] for name in ends})
    if value_head:
        return {**result, **VALUE_HEAD}
    names = registered.prediction
    for number in range(mtp_layers or 0):
        assert names is not None, "checked on the command line"
        parameters = _select_layer(per_layer, sparse=experts > 0, linear=False)
        layer = number + config.num_layers * names.after_the_last
        result |= _numbered(_prediction_layer(parameters, names), number, layer, experts)
    return result


def _not_in_layer(config: TransformerConfig, layer: int) -> list[str]:
    """Parts of names of what other layers of a network with compressed attention have."""
    without = [_EXPERT_BIAS if layer < config.hashed_layers else _TOKEN_EXPERTS]
    if not config.entry_selection[layer]:
        without.append(_INDEXER)
    if not config.entry_rates[layer]:
        without.append(_COMPRESSOR)
    return without


def tower_map(vision: VisionSettings) -> dict[str, Mapping]:
    """The parameters of a vision tower."""
    return {
        f"{TOWER}{name}": Whole(name_in_file(vision, name), shape)
        for name, shape in tower_shapes(vision).items()
    }


def _configured(family: ModelFamily, config: TransformerConfig) -> dict[str, Mapping]:
    """The family's parameters without those that this model does not have."""
    parameters = dict(family.parameters)
    if not config.moe_latent_size:
        for name in _LATENT_EXPERTS:
            parameters.pop(name, None)
    if not config.moe_shared_expert_intermediate_size:
        parameters = {name: m for name, m in parameters.items() if _SHARED_EXPERT not in name}
    beside = getattr(config, "experts_beside_mlp", False)
    absent = (_NORM_OF_MLP,) if beside else _BESIDE_MLP
    if not getattr(config, "layer_input_size", 0):
        absent = (*absent, *_LAYER_INPUTS)
    parameters = {n: m for n, m in parameters.items() if not any(part in n for part in absent)}
    if config.multi_latent_attention:
        if config.transformer_impl == "transformer_engine":
            for name in _DOWN_PROJECTIONS:
                sharded = parameters[name]
                assert isinstance(sharded, ColumnParallel)
                parameters[name] = ReplicatedRows(sharded.hf, sharded.rows)
        for name in _QUERY_LATENT if config.q_lora_rank is None else _QUERY_PROJECTION:
            parameters.pop(name)
        return parameters
    if not (family.qkv_bias or config.add_qkv_bias):
        parameters.pop(_QKV_BIAS, None)
    if not (family.qk_norm or config.qk_layernorm):
        for name in _QK_NORMS:
            parameters.pop(name, None)
    return parameters


def _select_layer(
    per_layer: MappingOf[str, Mapping], *, sparse: bool, linear: bool
) -> dict[str, Mapping]:
    """Parameters of one layer, dense or MoE, with a delta net or attention."""
    return {
        name: mapping
        for name, mapping in per_layer.items()
        if _of_sparse_layers(name) in (None, sparse) and _of_delta_nets(name) in (None, linear)
    }


def _prediction_layer(
    parameters: MappingOf[str, Mapping], names: PredictionNames
) -> dict[str, Mapping]:
    """Parameters of a multi-token prediction layer, derived from those of the model's layers."""
    start = "mtp.layers.{layer}."
    result = {start + name: mapping for name, mapping in names.parameters.items()}
    for name, mapping in parameters.items():
        own_name = name.removeprefix("decoder.layers.{layer}.")
        mapping = rename_prefix(mapping, names.layers, names.layer)
        result[f"{start}transformer_layer.{own_name}"] = mapping
    return result


def _numbered(
    parameters: MappingOf[str, Mapping], number: int, layer: int, experts: int
) -> dict[str, Mapping]:
    """Fill in layer numbers.

    Args:
        number: The layer's number in our names.
        layer: Its number in the file's names.
    """
    result: dict[str, Mapping] = {}
    for name, mapping in parameters.items():
        if "{expert}" not in name:
            result[name.format(layer=number)] = mapping.at(layer)
    for e in range(experts):
        for name, mapping in parameters.items():
            if "{expert}" in name:
                result[name.format(layer=number, expert=e)] = mapping.at(layer, e)
    return result


def _of_sparse_layers(name: str) -> bool | None:
    """Whether a parameter belongs to MoE layers only (True), to dense layers only (False), or to
    all (None)."""
    _, in_mlp, rest = name.partition(".mlp.")
    return rest.startswith(_EXPERT_LAYERS) if in_mlp else None


def _of_delta_nets(name: str) -> bool | None:
    """Like `_of_sparse_layers`, for layers with a delta net."""
    _, in_attention, rest = name.partition(".self_attention.")
    return rest.startswith(_DELTA_NET) if in_attention else None


def expert_number(name: str) -> int | None:
    """The expert that a parameter belongs to, from its canonical name; None for other parameters.

    Expert parameters are sharded and replicated over expert-tensor- and expert-parallel ranks.
    """
    _, separator, rest = name.partition(".mlp.experts.local_experts.")
    return int(rest.partition(".")[0]) if separator else None


def expert_name(name: str, expert: int) -> str:
    """The same parameter of another expert."""
    return _LOCAL_EXPERT.sub(rf"\g<1>{expert}\g<3>", name)


def local_experts(sizes: Sizes, layout: ParallelLayout) -> range:
    """The experts of each layer that this rank holds, fully or in part."""
    share = sizes.experts // layout.ep_size
    return range(layout.ep_rank * share, (layout.ep_rank + 1) * share)


def any_expert(name: str) -> str:
    """The name of an expert's parameter without the expert's number, for properties that all
    experts of a layer share."""
    return _LOCAL_EXPERT.sub(r"\1*\3", name)


def model_sizes(config: TransformerConfig, gpt: GPTModelConfig) -> Sizes:
    """Sizes of the full model. config: its TransformerConfig."""
    assert gpt.vocab_size is not None, "set when the command line is parsed"
    layer_input = getattr(config, "layer_input_size", 0)
    return Sizes(
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab=gpt.vocab_size,
        experts=config.num_moe_experts or 0,
        expert_ffn=config.moe_ffn_hidden_size or 0,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        expert_latent=config.moe_latent_size or 0,
        **_latent_sizes(config),
        **_delta_sizes(config),
        index_heads=getattr(config, "index_n_heads", 0),
        index_dim=getattr(config, "index_head_dim", 0),
        index_pool=getattr(config, "index_pool", 0),
        streams=getattr(config, "residual_streams", 0),
        stream_rank=getattr(config, "stream_rank", 0),
        attention=layers_of(config),
        ffn_of_readers=config.ffn_hidden_size * (2 if getattr(config, "wide_mlps", False) else 1),
        layer_input=layer_input,
        layer_inputs=layer_input * config.num_layers,
        memory=getattr(config, "ngram_memory", None),
        **_compressed_sizes(config),
    )


def _compressed_sizes(config: TransformerConfig) -> dict[str, Any]:
    if not hasattr(config, "entry_rates"):
        return {}
    pairs = zip(config.entry_rates, config.entry_selection, strict=True)
    return dict(
        q_latent=config.q_lora_rank,
        topk=config.moe_router_topk,
        entries=tuple((rate, bool(selects)) for rate, selects in pairs),
        grouped_output=config.output_groups * config.output_rank,
        query_of_group=config.num_attention_heads * config.kv_channels // config.output_groups,
    )


def _latent_sizes(config: TransformerConfig) -> dict[str, Any]:
    if not config.multi_latent_attention:
        return {}
    return dict(
        q_latent=config.q_lora_rank or 0,
        kv_latent=config.kv_lora_rank,
        rotary=config.qk_pos_emb_head_dim,
        head_key=config.qk_head_dim,
        head_value=config.v_head_dim,
    )


def _delta_sizes(config: TransformerConfig) -> dict[str, Any]:
    if not config.linear_attention_freq:
        return {}
    return dict(
        delta_groups=config.linear_num_key_heads,
        delta_heads=config.linear_num_value_heads,
        delta_key=config.linear_key_head_dim,
        delta_value=config.linear_value_head_dim,
        delta_taps=config.linear_conv_kernel_dim,
    )


def canonical_name(name: str) -> str:
    """Convert a parameter's name from either layer spec to the spec without Transformer Engine."""
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + plain
    return _GROUPED_EXPERT.sub(r".experts.local_experts.\3.\1.\2", name)


def unwrap(chunk: MegatronModule) -> MegatronModule:
    """The GPTModel inside data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_weights(chunk: MegatronModule) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are weights: router biases, indexers and Gemma 4's scalars of
    layers. Every persistent buffer has to be one of them; others would be lost in files and
    engines."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            if own in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{own}"
            assert name.endswith(_BUFFERS) or _INDEXER in name, (
                f"{name}: this persistent buffer has no mapping; what is no weight is registered "
                "with persistent=False"
            )
            yield name, buffer


def float32_buffers(model_chunks: Sequence[MegatronModule]) -> frozenset[str]:
    """Canonical names of the weights on this rank that modules name in `float32_buffers`: they stay
    in float32 in a model in half precision, and so they do in its files."""
    kept = {
        id(getattr(module, name))
        for chunk in model_chunks
        for module in chunk.modules()
        for name in getattr(module, "float32_buffers", ())
    }
    return frozenset(name for name, tensor in global_parameters(model_chunks) if id(tensor) in kept)


def global_parameters(model_chunks: Sequence[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name with global layer and expert numbers, parameter) of everything on this
    rank."""
    for chunk in map(unwrap, model_chunks):
        for name, parameter in named_weights(chunk):
            full = canonical_name(name)
            if (match := LAYER.match(full)) is not None:
                part = match[1]
                local = int(match[2])
                rest = full[match.end() :]
                if part == "decoder":
                    layer = chunk.decoder.layers[local]
                    full = f"decoder.layers.{layer.layer_number - 1}.{rest}"  # 1-based
                else:
                    layer = chunk.mtp.layers[local].transformer_layer
                if (expert := expert_number(full)) is not None:
                    full = expert_name(full, layer.mlp.local_expert_indices[expert])
            yield full, parameter
