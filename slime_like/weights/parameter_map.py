"""Every parameter of a model of some family, and how it is made of Hugging Face tensors.

Names are those of the layer spec without Transformer Engine; with it, the norm in front of a linear
layer is a parameter of that layer, its grouped experts are numbered parameters of one layer, and
`canonical_name` takes such names back to ours. An expert's number in a name is that of the whole
model, "{expert}" in a map.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from arguments.hf.moe import moe_layers
from arguments.schema import GPTModelConfig
from slime_like.weights.families import EMBEDDING, OUTPUT_LAYER, model_families
from slime_like.weights.families.base import ATTENTION, HF_ATTENTION
from slime_like.weights.mappings import (
    Mapping,
    Replicated,
    ReplicatedRows,
    Sizes,
)

# Transformer Engine's layers have the down-projections whole on every tensor-parallel rank
_WHOLE_DOWN_PROJECTIONS: dict[str, Mapping] = {
    f"{ATTENTION}.linear_q_down_proj.weight": ReplicatedRows(
        f"{HF_ATTENTION}.q_a_proj.weight", "q_latent"
    ),
    f"{ATTENTION}.linear_kv_down_proj.weight": ReplicatedRows(
        f"{HF_ATTENTION}.kv_a_proj_with_mqa.weight", "kv_latent_and_rotary"
    ),
}

# A critic's head, under the names of *ForTokenClassification. *ForSequenceClassification has the
# same weight and no bias.
VALUE_HEAD: dict[str, Mapping] = {
    "output_layer.weight": ReplicatedRows("score.weight", "one"),
    "output_layer.bias": Replicated("score.bias", "one"),
}

# Norms that Transformer Engine fuses into the following linear layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
# Transformer Engine's grouped experts: one layer, a weight for each.
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")


_OF_WHOLE_QUERIES = (f"{ATTENTION}.linear_q_proj.weight",)
_OF_COMPRESSED_QUERIES = tuple(
    f"{ATTENTION}.{name}.weight"
    for name in ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")
)


def family_map(
    architecture: str, config: Any, *, tied: bool, value_head: bool = False
) -> dict[str, Mapping]:
    """Every parameter of the whole model, in the order of the network. Layer numbers are global,
    from 0.

    config: the model's TransformerConfig. tied: the output layer is the embedding. (Where they are
    on different pipeline stages megatron-core keeps a copy of it as the last stage's
    output_layer.weight.) value_head: a critic, which has no output layer. Raises ValueError for an
    architecture that is not registered.
    """
    family = dict(model_families.get(architecture).parameters)
    if tied:
        family[OUTPUT_LAYER] = family[EMBEDDING]
    if config.multi_latent_attention:
        if config.transformer_impl == "transformer_engine":
            family |= _WHOLE_DOWN_PROJECTIONS
        for name in _OF_COMPRESSED_QUERIES if config.q_lora_rank is None else _OF_WHOLE_QUERIES:
            family.pop(name)
    per_layer = {name: mapping for name, mapping in family.items() if "{layer}" in name}
    ends = ("decoder.final_layernorm.weight", OUTPUT_LAYER)
    whole = {
        name: mapping
        for name, mapping in family.items()
        if name not in per_layer and name not in ends
    }
    experts = config.num_moe_experts or 0
    for layer, sparse in enumerate(
        moe_layers(config.moe_layer_freq if experts else None, config.num_layers)
    ):
        own = {
            name: mapping
            for name, mapping in per_layer.items()
            if _of_sparse_layers(name) in (None, sparse)
        }
        each = {name: mapping for name, mapping in own.items() if "{expert}" in name}
        whole.update(
            {
                name.format(layer=layer): mapping.at(layer)
                for name, mapping in own.items()
                if name not in each
            }
        )
        for e in range(experts if each else 0):
            whole.update(
                {
                    name.format(layer=layer, expert=e): mapping.at(layer, e)
                    for name, mapping in each.items()
                }
            )
    whole.update({name: family[name] for name in ends})
    return {**whole, **VALUE_HEAD} if value_head else whole


def _of_sparse_layers(name: str) -> bool | None:
    """Whether a map's parameter is in layers with experts only (True), in dense ones only (False),
    or in all (None)."""
    _, in_mlp, rest = name.partition(".mlp.")
    return rest.startswith(("router.", "experts.", "shared_experts.")) if in_mlp else None


def expert_number(name: str) -> int | None:
    """The expert that a parameter belongs to, by its canonical name; None for parameters that are
    not an expert's.

    The experts' parameters are cut and replicated by the grid of expert-tensor- and expert-parallel
    ranks.
    """
    _, found, rest = name.partition(".mlp.experts.local_experts.")
    return int(rest.partition(".")[0]) if found else None


def any_expert(name: str) -> str:
    """The name of an expert's parameter without its number: what holds for one expert of a layer
    holds for all."""
    return _LOCAL_EXPERT.sub(r"\1*\3", name)


def model_sizes(config: Any, gpt: GPTModelConfig) -> Sizes:
    """Sizes of the whole model. config: the model's TransformerConfig."""
    assert gpt.vocab_size is not None, (
        "the vocabulary size is known once the command line is parsed"
    )
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
        **_latent_sizes(config),
    )


def _latent_sizes(config: Any) -> dict[str, int]:
    if not config.multi_latent_attention:
        return {}
    return dict(
        q_latent=config.q_lora_rank or 0,
        kv_latent=config.kv_lora_rank,
        rotary=config.qk_pos_emb_head_dim,
        head_key=config.qk_head_dim,
        head_value=config.v_head_dim,
    )


def canonical_name(name: str) -> str:
    """A parameter's name under either layer spec -> its name without Transformer Engine."""
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + plain
    return _GROUPED_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_weights(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the routers' biases, which are buffers."""
    yield from chunk.named_parameters()
    yield from (
        (name, buffer)
        for name, buffer in chunk.named_buffers()
        if name.endswith(".router.expert_bias")
    )


def global_parameters(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name with the global layer number and the global expert number, parameter) of
    everything on this rank."""
    for chunk in map(unwrap, model_chunks):
        for name, parameter in named_weights(chunk):
            prefix, full = "decoder.layers.", canonical_name(name)
            if name.startswith(prefix):
                local, _, rest = full.removeprefix(prefix).partition(".")
                layer = chunk.decoder.layers[int(local)]
                full = f"{prefix}{layer.layer_number - 1}.{rest}"  # megatron-core counts from 1
                if expert_number(full) is not None:
                    own = layer.mlp.local_expert_indices
                    full = _LOCAL_EXPERT.sub(
                        lambda found, own=own: (  # type: ignore[misc]
                            f"{found[1]}{own[int(found[2])]}{found[3]}"
                        ),
                        full,
                    )
            yield full, parameter
