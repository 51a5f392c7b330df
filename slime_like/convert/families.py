"""One declarative map per model family: megatron-core's parameter name -> how it is made of Hugging Face tensors.

Names are those of the layer spec without Transformer Engine; with it, the norm in front of a linear layer is a parameter
of that layer, and `canonical_name` takes its name back to ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from arguments.groups import GPTModelConfig
from slime_like.convert.mappings import QKV, GatedMLP, Mapping, Replicated, RowParallel, Sizes, VocabParallel

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"

LLAMA: dict[str, Mapping] = {
    "embedding.word_embeddings.weight": VocabParallel("model.embed_tokens.weight"),
    "decoder.layers.{layer}.input_layernorm.weight": Replicated("model.layers.{layer}.input_layernorm.weight"),
    "decoder.layers.{layer}.self_attention.linear_qkv.weight": QKV(
        f"{_ATTENTION}.q_proj.weight", f"{_ATTENTION}.k_proj.weight", f"{_ATTENTION}.v_proj.weight"
    ),
    "decoder.layers.{layer}.self_attention.linear_proj.weight": RowParallel(f"{_ATTENTION}.o_proj.weight", "query"),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated("model.layers.{layer}.post_attention_layernorm.weight"),
    "decoder.layers.{layer}.mlp.linear_fc1.weight": GatedMLP(f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "decoder.layers.{layer}.mlp.linear_fc2.weight": RowParallel(f"{_MLP}.down_proj.weight", "ffn"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    "output_layer.weight": VocabParallel("lm_head.weight"),
}

QWEN2: dict[str, Mapping] = {
    **LLAMA,
    "decoder.layers.{layer}.self_attention.linear_qkv.bias": QKV(
        f"{_ATTENTION}.q_proj.bias", f"{_ATTENTION}.k_proj.bias", f"{_ATTENTION}.v_proj.bias", bias=True
    ),
}

QWEN3: dict[str, Mapping] = {
    **LLAMA,
    "decoder.layers.{layer}.self_attention.q_layernorm.weight": Replicated(f"{_ATTENTION}.q_norm.weight", "head_dim"),
    "decoder.layers.{layer}.self_attention.k_layernorm.weight": Replicated(f"{_ATTENTION}.k_norm.weight", "head_dim"),
}

FAMILIES = {"LlamaForCausalLM": LLAMA, "Qwen2ForCausalLM": QWEN2, "Qwen3ForCausalLM": QWEN3}

# Norms that Transformer Engine fuses into the following linear layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def family_map(architecture: str, num_layers: int, *, tied: bool) -> dict[str, Mapping]:
    """Every parameter of the whole model, in the order of the network. Layer numbers are global, from 0.

    tied: the output layer is the embedding. (Where they are on different pipeline stages megatron-core keeps a copy of it
    as the last stage's output_layer.weight.) Raises ValueError for an architecture without a map.
    """
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} has no conversion map; legal values: {', '.join(FAMILIES)}")
    family = dict(FAMILIES[architecture])
    if tied:
        family["output_layer.weight"] = family["embedding.word_embeddings.weight"]
    per_layer = {name: mapping for name, mapping in family.items() if "{layer}" in name}
    ends = ("decoder.final_layernorm.weight", "output_layer.weight")
    whole = {name: mapping for name, mapping in family.items() if name not in per_layer and name not in ends}
    for layer in range(num_layers):
        whole.update({name.format(layer=layer): mapping.at(layer) for name, mapping in per_layer.items()})
    whole.update({name: family[name] for name in ends})
    return whole


def model_sizes(config: Any, gpt: GPTModelConfig) -> Sizes:
    """Sizes of the whole model. config: the model's TransformerConfig."""
    assert gpt.vocab_size is not None, "the vocabulary size is known once the command line is parsed"
    return Sizes(
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups,
        head_dim=config.kv_channels,
        vocab=gpt.vocab_size,
    )


def canonical_name(name: str) -> str:
    """A parameter's name under either layer spec -> its name without Transformer Engine."""
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith("." + fused):
            return name.removesuffix(fused) + plain
    return name


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def global_parameters(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name with the global layer number, parameter) of everything on this rank."""
    for chunk in map(unwrap, model_chunks):
        for name, parameter in chunk.named_parameters():
            prefix, rest = "decoder.layers.", name
            if name.startswith(prefix):
                local, _, rest = name.removeprefix(prefix).partition(".")
                layer = chunk.decoder.layers[int(local)].layer_number - 1  # megatron-core counts from 1
                rest = f"{prefix}{layer}.{rest}"
            yield canonical_name(rest), parameter
