"""Keys of a Hugging Face config.json: those of all architectures, those without effect on the
network's function, those that are rejected, and the legal types of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
# Popular architectures that are not supported -> the missing feature.
UNSUPPORTED: Mapping[str, str] = {
    "DeepseekV4ForCausalLM": "attention to compressed keys and several residual streams",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu"}
DTYPES = ("float32", "bfloat16", "float16")
LARGEST = 2**31  # bound of all numbers in the file
MOST_LAYERS = 10_000


def is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST  # false for NaN
    )


def _is_rope(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_number(v) if key in ROPE_NUMBERS else isinstance(v, str)
        for key, v in value.items()
        if v is not None and key in (*ROPE_NUMBERS, "type", "rope_type")
    )


def _list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list)
        and len(value) <= MOST_LAYERS
        and all(type(each) is kind for each in value)
    )


ROPE_NUMBERS = frozenset(
    [
        "factor",
        "rope_theta",
        "partial_rotary_factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ]
)
TEXT = ("a string", lambda value: isinstance(value, str))
NUMBER = ("a finite number", is_number)
SWITCH = ("true or false", lambda value: isinstance(value, bool))
COUNT = (
    f"an integer from 0 to {MOST_LAYERS}",
    lambda value: type(value) is int and 0 <= value <= MOST_LAYERS,
)
ROPE = ("an object with numbers and a rope_type", _is_rope)
# Keys that are read as something other than a positive number -> (legal values, test)
KINDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    "architectures": ("a list of names", _list_of(str)),
    "layer_types": ("a list of names", _list_of(str)),
    "indexer_types": ("a list of names", _list_of(str)),
    "mlp_layer_types": ("a list of names", _list_of(str)),
    "mlp_only_layers": ("a list of layers", _list_of(int)),
    "no_rope_layers": ("a list of numbers", _list_of(int)),
    "attn_type_list": ("a list of numbers", _list_of(int)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE),
    **dict.fromkeys(
        ("quantization_config", "text_config"), ("an object", lambda value: isinstance(value, dict))
    ),
    **dict.fromkeys(
        ("model_type", "hidden_act", "dtype", "torch_dtype", "index_topk_pattern"), TEXT
    ),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "attention_dropout"), NUMBER),
    **dict.fromkeys(("use_mtp", "use_routing_bias", "use_qk_norm"), SWITCH),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "max_window_layers",
            "first_k_dense_replace",
            "n_shared_experts",
            "num_nextn_predict_layers",
            "num_mtp_modules",
        ),
        COUNT,
    ),
}
