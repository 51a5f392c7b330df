"""StableLM 2: Llama's layers, with LayerNorm for RMSNorm and a quarter of each head rotated."""

from typing import Any

from slime_like.weights.families import ConfigReader, ModelFamily, qwen2, register_model_family
from slime_like.weights.mappings import Mapping, Replicated

# megatron-core parameter -> the Hugging Face tensors it consists of, and how it is sharded.
# Projections and norm weights have Llama's names; the biases of query, key and value have Qwen2's.
NORMS = {
    "decoder.layers.{layer}.input_layernorm": "model.layers.{layer}.input_layernorm",
    "decoder.layers.{layer}.pre_mlp_layernorm": "model.layers.{layer}.post_attention_layernorm",
    "decoder.final_layernorm": "model.norm",
}
PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    **{f"{name}.bias": Replicated(f"{hf_name}.bias") for name, hf_name in NORMS.items()},
}


def settings(reader: ConfigReader) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig; rejects options that the model lacks."""
    for key in ("use_parallel_residual", "qk_layernorm"):
        if reader.config.get(key):
            reader.refuse(f"{key} true is not supported")
    return {
        "normalization": "LayerNorm",
        "layernorm_epsilon": reader.number("layer_norm_eps", default=1e-5, whole=False),
        "add_qkv_bias": bool(reader.config.get("use_qkv_bias")),
    }


register_model_family(
    ModelFamily(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        parameters=PARAMETERS,
        keys=frozenset(  # in addition to the common ones; any other key is an error
            ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "qk_layernorm")
        ),
        rotary_percent=lambda reader: 0.25,  # for files without partial_rotary_factor
        settings=settings,
        published=("stablelm-2",),
        tiny={"use_qkv_bias": True},  # for scripts/make_tiny_model.py
    )
)
