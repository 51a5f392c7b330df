"""Keys of a Hugging Face config.json: those of all architectures, those without effect on the
network's function, those that are rejected, and the legal types of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
MAPPED = frozenset(REQUIRED) | {
    "architectures",
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "torch_dtype",
    "dtype",
    "quantization_config",
    # windows.py
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
}
# Tokens, generation, initialisation and bookkeeping: the network's function does not depend on
# them.
WITHOUT_EFFECT = frozenset(
    [
        "_name_or_path",
        "transformers_version",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
        "is_llama_config",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "use_cache",
        "pretraining_tp",
        "task_specific_params",
        "prefix",
        "tokenizer_class",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "return_dict_in_generate",
        "output_scores",
        "chunk_size_feed_forward",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_autoset",
        "is_decoder",
        "torchscript",
        "use_bfloat16",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "classifier_dropout",
        "token_classification_bias",
    ]
)
REFUSED_WHEN_SET = {
    "attention_bias": "attention biases are not supported with this architecture",
    "mlp_bias": "biases in the MLP are not supported",
    "router_jitter_noise": "noise on the router's input is not supported",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "add_cross_attention": "cross attention is not supported",
    "pruned_heads": "pruned heads are not supported",
    "tie_encoder_decoder": "encoder-decoder models are not supported",
}
_MAMBA = "Mamba layers of another kind"
_CLASSIC = "LayerNorm with biases and an MLP without a gate"
# Popular architectures that are not supported -> (what is missing, the nearest family).
UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "DeepseekV2ForCausalLM": ("softmax routing by groups", "DeepseekV3ForCausalLM"),
    **dict.fromkeys(
        (
            "MambaForCausalLM",
            "Mamba2ForCausalLM",
            "FalconMambaForCausalLM",
            "FalconH1ForCausalLM",
            "BambaForCausalLM",
            "JambaForCausalLM",
            "ZambaForCausalLM",
            "Zamba2ForCausalLM",
        ),
        (_MAMBA, "NemotronHForCausalLM"),
    ),
    "Lfm2VlForConditionalGeneration": ("a tower of its own", "Lfm2ForCausalLM"),
    **dict.fromkeys(
        ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
        ("lightning attention", "MiniMaxM2ForCausalLM"),
    ),
    "BailingHybridForCausalLM": ("linear attention with its own decay", "Qwen3NextForCausalLM"),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        ("attention within chunks and queries scaled by position", "LlamaForCausalLM"),
    ),
    "Ministral3ForCausalLM": ("queries scaled by position", "MistralForCausalLM"),
    **dict.fromkeys(
        ("GemmaForCausalLM", "Gemma2ForCausalLM"),
        ("soft caps of scores and logits, or no norms of queries and keys", "Gemma3ForCausalLM"),
    ),
    **dict.fromkeys(
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        ("embeddings by layer and alternating updates", "Gemma3ForCausalLM"),
    ),
    "MiniCPM3ForCausalLM": (
        "multipliers of embeddings, residual terms and logits with latent attention",
        "GraniteForCausalLM",
    ),
    **dict.fromkeys(
        ("CohereForCausalLM", "Cohere2ForCausalLM"),
        ("attention and MLP in parallel, and scaled logits", "LlamaForCausalLM"),
    ),
    "LongcatFlashForCausalLM": (
        "two attentions in a layer and experts that pass their input on",
        "DeepseekV3ForCausalLM",
    ),
    "Ernie4_5_MoeForCausalLM": ("softmax routing with a bias", "Qwen3MoeForCausalLM"),
    **dict.fromkeys(
        ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
        ("norms of queries and keys after their rotation", "Qwen3ForCausalLM"),
    ),
    "ApertusForCausalLM": ("xIELU activations", "LlamaForCausalLM"),
    "PhimoeForCausalLM": ("sparse mixing in the router, and LayerNorm", "MixtralForCausalLM"),
    "OlmoForCausalLM": ("norms without weights", "Olmo2ForCausalLM"),
    **dict.fromkeys(
        (
            "GPT2LMHeadModel",
            "GPTNeoXForCausalLM",
            "GPTBigCodeForCausalLM",
            "Starcoder2ForCausalLM",
            "NemotronForCausalLM",
            "PhiForCausalLM",
            "OPTForCausalLM",
            "FalconForCausalLM",
            "BloomForCausalLM",
        ),
        (_CLASSIC, "LlamaForCausalLM"),
    ),
    **dict.fromkeys(
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration"),
        ("speech", "Qwen3VLMoeForConditionalGeneration"),
    ),
    **dict.fromkeys(
        ("InternVLForConditionalGeneration", "LlavaForConditionalGeneration"),
        ("a text model of any kind", "Qwen3VLForConditionalGeneration"),
    ),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu"}
DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 2**31  # bound of all numbers in the file
MOST_LAYERS = 10_000


Number = Annotated[float, Field(gt=-LARGEST, lt=LARGEST)]  # neither NaN nor infinite
Count = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Names = Annotated[list[str], Field(max_length=MOST_LAYERS, fail_fast=True)]
Letters = Annotated[str, Field(max_length=MOST_LAYERS)]
Integers = Annotated[list[int], Field(max_length=MOST_LAYERS, fail_fast=True)]
Numbers = Annotated[list[Number | None], Field(max_length=MOST_LAYERS, fail_fast=True)]


class RopeTypes(TypedDict, total=False):
    """Settings of rotary embeddings."""

    type: str | None
    rope_type: str | None
    factor: Number | None
    rope_theta: Number | None
    partial_rotary_factor: Number | None
    low_freq_factor: Number | None
    high_freq_factor: Number | None
    original_max_position_embeddings: Number | None
    beta_fast: Number | None
    beta_slow: Number | None
    mscale: Number | None
    mscale_all_dim: Number | None
    attention_factor: Number | None


class RopeByKind(RopeTypes, total=False):
    """The same, or by kind of layer."""

    full_attention: RopeTypes | None
    sliding_attention: RopeTypes | None
    main: RopeTypes | None
    compress: RopeTypes | None


class LinearLayers(TypedDict, total=False):
    """Layers of Kimi-Linear, by numbers from 1, and sizes of its delta nets."""

    kda_layers: Integers | None
    full_attn_layers: Integers | None
    head_dim: int | None
    num_heads: int | None
    short_conv_kernel_size: int | None
    gate_lower_bound: Number | None
    safe_gate: bool | None


class ConfigTypes(TypedDict, total=False):
    """Keys that are read as something other than a positive number."""

    architectures: Names | None
    layer_types: Names | None
    layers_block_type: Names | None
    mtp_layers_block_type: Names | None
    hybrid_override_pattern: Letters | None
    indexer_types: Names | None
    hybrid_layer_pattern: Integers | None
    compress_ratios: Integers | None
    compress_rates: dict[str, object] | None
    mlp_layer_types: Names | None
    per_layer_config: dict[str, object] | None
    mlp_only_layers: Integers | None
    full_attn_idxs: Integers | None
    no_rope_layers: Integers | None
    attn_type_list: Integers | None
    rope_scaling: RopeByKind | None
    rope_parameters: RopeByKind | None
    quantization_config: dict[str, object] | None
    text_config: dict[str, object] | None
    linear_attn_config: LinearLayers | None
    model_type: str | None
    hidden_act: str | None
    dtype: str | None
    torch_dtype: str | None
    index_topk_pattern: str | None
    rope_theta: Number | None
    rope_theta_of_layers: Numbers | None  # `rope_theta` that is a list; see _type_problems
    partial_rotary_factor: Number | None
    partial_rotary_factors: Numbers | None
    swiglu_limits: Numbers | None
    swiglu_limits_shared: Numbers | None
    moe_layers_enum: Letters | Integers | None
    attention_other_setting: dict[str, object] | None
    yarn_only_types: Names | None
    attention_dropout: Number | None
    use_mtp: bool | None
    use_routing_bias: bool | None
    use_qk_norm: bool | None
    num_hidden_layers: Count | None
    max_window_layers: Count | None
    first_k_dense_replace: Count | None
    n_shared_experts: Count | None
    num_shared_experts: Count | None
    num_nextn_predict_layers: Count | None
    num_hash_layers: Count | None
    num_mtp_modules: Count | None


CONFIG_TYPES = TypeAdapter(ConfigTypes)
