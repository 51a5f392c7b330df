"""StableLM 2: Llama's layers, with LayerNorm for RMSNorm and a quarter of each head rotated."""

from typing import Any

from slime_like.weights.families import ConfigReader, ModelFamily, qwen2, register_model_family
from slime_like.weights.mappings import Mapping, Replicated

# megatron-core's parameter -> the tensors it is made of, and how it is cut over ranks. Projections
# and norms' weights have Llama's names, biases of query, key and value Qwen2's.
NORMS = {
    "decoder.layers.{layer}.input_layernorm": "model.layers.{layer}.input_layernorm",
    "decoder.layers.{layer}.pre_mlp_layernorm": "model.layers.{layer}.post_attention_layernorm",
    "decoder.final_layernorm": "model.norm",
}
PARAMETERS: dict[str, Mapping] = {
    **qwen2.PARAMETERS,
    **{f"{ours}.bias": Replicated(f"{theirs}.bias") for ours, theirs in NORMS.items()},
}


def settings(reader: ConfigReader) -> dict[str, Any]:
    """Of megatron-core's TransformerConfig. What the network would need besides is refused."""
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
        keys=frozenset(  # beyond those of every architecture; any other key is an error
            ("layer_norm_eps", "use_qkv_bias", "use_parallel_residual", "qk_layernorm")
        ),
        rotary_percent=lambda reader: 0.25,  # of files without partial_rotary_factor
        settings=settings,
        published=("stablelm-2",),
        tiny={"use_qkv_bias": True},  # of scripts/make_tiny_model.py, beyond the usual sizes
    )
)
