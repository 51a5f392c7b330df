"""Llama 2 and 3."""

from __future__ import annotations

from slime_like.weights.families.base import (
    ATTENTION,
    EMBEDDING,
    HF_ATTENTION,
    HF_MLP,
    LM_HEAD,
    MLP,
    OUTPUT_LAYER,
    ModelFamily,
    register_model_family,
)
from slime_like.weights.mappings import (
    QKV,
    GatedMLP,
    Mapping,
    Replicated,
    RowParallel,
    VocabParallel,
)

PARAMETERS: dict[str, Mapping] = {
    EMBEDDING: VocabParallel("model.embed_tokens.weight"),
    "decoder.layers.{layer}.input_layernorm.weight": Replicated(
        "model.layers.{layer}.input_layernorm.weight"
    ),
    f"{ATTENTION}.linear_qkv.weight": QKV(
        f"{HF_ATTENTION}.q_proj.weight",
        f"{HF_ATTENTION}.k_proj.weight",
        f"{HF_ATTENTION}.v_proj.weight",
    ),
    f"{ATTENTION}.linear_proj.weight": RowParallel(f"{HF_ATTENTION}.o_proj.weight", "query"),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": Replicated(
        "model.layers.{layer}.post_attention_layernorm.weight"
    ),
    f"{MLP}.linear_fc1.weight": GatedMLP(f"{HF_MLP}.gate_proj.weight", f"{HF_MLP}.up_proj.weight"),
    f"{MLP}.linear_fc2.weight": RowParallel(f"{HF_MLP}.down_proj.weight", "ffn"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    OUTPUT_LAYER: VocabParallel(LM_HEAD),
}

register_model_family(
    ModelFamily(
        "LlamaForCausalLM",
        "llama",
        PARAMETERS,
        published=("Llama-2", "Llama-3", "Meta-Llama-3", "DeepSeek-R1-Distill-Llama"),
    )
)
