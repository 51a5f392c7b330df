"""The shape of a Hugging Face model, as settings of megatron-core: reads config.json and nothing
else.

Every key of the file is either mapped, known not to change the network's function, or refused by
name: a key that is overlooked would train another network than the one in the checkpoint. Formats
of transformers 4 (`rope_theta`,
`rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both read.

Not supported here, hence refused: projection biases other than Qwen2's, sliding windows, partial
rotation, quantised weights, and the rotary types dynamic, yarn and longrope.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arguments.hf import deepseek
from arguments.hf.moe import MIXTRAL, QWEN2_MOE, QWEN_MOE, MoeFamily, moe_settings
from slime_like.checkpoints.files import read_json
from slime_like.config import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class HfModel:
    """What config.json says.

    architecture: e.g. "LlamaForCausalLM". model_type: e.g. "llama". dtype: the name of the stored
    weights' dtype, e.g. "bfloat16", or None where the file does not say. transformer:
    TransformerConfig field -> value; `activation_func` is a name ("silu"), not a callable. gpt:
    GPTModelConfig field -> value.
    """

    architecture: str
    model_type: str
    transformer: dict[str, Any]
    gpt: dict[str, Any]
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes one architecture from another. required: keys beyond REQUIRED that the
    file must have. moe: its experts. windows_by_size: `sliding_window` alone switches sliding
    windows on. deepseek: latent attention, and experts chosen by sigmoids: hf_deepseek.py."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    required: tuple[str, ...] = ()
    moe: MoeFamily | None = None
    windows_by_size: bool = False
    deepseek: bool = False


MOE_KEYS = ("num_key_value_heads", "num_experts_per_tok")
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, required=("num_key_value_heads",)),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, required=("num_key_value_heads", "head_dim")),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qk_norm=True,
        required=(*MOE_KEYS, "head_dim", "moe_intermediate_size"),
        moe=QWEN_MOE,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias=True,
        required=(*MOE_KEYS, "moe_intermediate_size", "shared_expert_intermediate_size"),
        moe=QWEN2_MOE,
    ),
    "MixtralForCausalLM": Family(
        "mixtral", required=(*MOE_KEYS, "num_local_experts"), moe=MIXTRAL, windows_by_size=True
    ),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", required=deepseek.REQUIRED, deepseek=True),
}
VALUE_MODELS = re.compile(r"For(?:Token|Sequence)Classification$")
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
    # read by _check_windows
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
}
# Tokens, generation, initialisation and bookkeeping: the network's function does not depend on
# them.
WITHOUT_EFFECT = frozenset(
    """_name_or_path transformers_version transformers.js_config unsloth_version unsloth_fixed is_llama_config auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id initializer_range use_cache
    pretraining_tp task_specific_params prefix tokenizer_class problem_type id2label label2id num_labels return_dict
    output_attentions output_hidden_states return_dict_in_generate output_scores chunk_size_feed_forward
    _attn_implementation attn_implementation _attn_implementation_autoset is_decoder torchscript use_bfloat16
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens classifier_dropout token_classification_bias""".split()  # noqa: SIM905
)
REFUSED_WHEN_SET = {
    "attention_bias": "biases on the attention projections are not supported with this architecture",
    "mlp_bias": "biases in the MLP are not supported",
    "router_jitter_noise": "noise on the router's input is not supported",
    "quantization_config": "quantised weights are not supported; use the unquantised model",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "add_cross_attention": "cross attention is not supported",
    "pruned_heads": "pruned heads are not supported",
    "tie_encoder_decoder": "encoder-decoder models are not supported",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu"}
DTYPES = ("float32", "bfloat16", "float16")
# megatron-core's rotary embedding has these numbers of Llama 3.1 built in; only the factor is an
# argument.
LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_KEYS = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *LLAMA3_FIXED}),
}
LARGEST = 2**31  # of any number in such a file
MOST_LAYERS = 10_000
DEFAULT_ROPE_THETA = 10000.0  # transformers' default_theta


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST  # false for NaN
    )


def _is_rope(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_number(v) if key in ROPE_NUMBERS else isinstance(v, str)
        for key, v in value.items()
        if v is not None and key in (*ROPE_NUMBERS, "type", "rope_type")
    )


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list)
        and len(value) <= MOST_LAYERS
        and all(type(each) is kind for each in value)
    )


ROPE_NUMBERS = frozenset(
    """factor rope_theta partial_rotary_factor low_freq_factor high_freq_factor original_max_position_embeddings
    beta_fast beta_slow mscale mscale_all_dim attention_factor""".split()  # noqa: SIM905
)
TEXT = ("a text", lambda value: isinstance(value, str))
NUMBER = ("a finite number", _is_number)
COUNT = (
    f"an integer from 0 to {MOST_LAYERS}",
    lambda value: type(value) is int and 0 <= value <= MOST_LAYERS,
)
ROPE = ("an object with numbers and a rope_type", _is_rope)
# What keys of the file must be where they are looked at other than as a positive number: (legal
# values, test)
KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "architectures": ("a list of names", _list_of(str)),
    "layer_types": ("a list of names", _list_of(str)),
    "mlp_only_layers": ("a list of layers", _list_of(int)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE),
    **dict.fromkeys(("model_type", "hidden_act", "dtype", "torch_dtype"), TEXT),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "attention_dropout"), NUMBER),
    **dict.fromkeys(
        ("num_hidden_layers", "max_window_layers", "first_k_dense_replace", "n_shared_experts"),
        COUNT,
    ),
}


@dataclass(slots=True)
class _Reader:
    """config.json and what is wrong with it."""

    folder: str
    config: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, message: str) -> None:
        self.problems.append(Problem("--hf-checkpoint", self.folder, f"config.json: {message}"))

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> Any:
        """A positive number; `default` where the key is absent or null. 1, and a problem, when
        there is none."""
        value = self.config.get(key)
        value = default if value is None else value
        kind = int if whole else (int, float)
        if isinstance(value, kind) and not isinstance(value, bool) and 0 < value < LARGEST:
            return value
        self.refuse(f"{key} must be a positive {'integer' if whole else 'number'}, not {value!r}")
        return 1


def read_hf_model(folder: str, *, value_head: bool = False) -> HfModel:
    """The model that `folder`/config.json describes.

    value_head: the file may also be that of a model with a head that scores tokens (VALUE_MODELS),
    which is read as the language model with the same transformer. Raises ConfigError (a ValueError)
    with everything that is unsupported, by key and value, in one go.
    """
    reader = _Reader(folder, _read_config(folder))
    architecture, family = _family(reader, value_head)
    _check_keys(reader, family)
    _check_windows(reader, family)
    transformer = _transformer(reader, family)
    gpt = _gpt(
        reader,
        head_dim=transformer["kv_channels"],
        rope=_latent_rope(transformer) if family.deepseek else _rope(reader),
    )
    dtype = reader.config.get("dtype") or reader.config.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        reader.refuse(f"dtype {dtype!r} is not supported; legal values: {', '.join(DTYPES)}")
    if reader.problems:
        raise ConfigError(reader.problems)
    return HfModel(architecture, family.model_type, transformer, gpt, dtype)


def _read_config(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        what = "no config.json in this folder" if Path(folder).is_dir() else "no such folder"
        raise ConfigError(
            [
                Problem(
                    "--hf-checkpoint",
                    folder,
                    f"{what}; give a local folder with a Hugging Face model",
                )
            ]
        )
    try:
        config = read_json(path)
        repr(config)  # as messages have it
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            [Problem("--hf-checkpoint", folder, f"config.json cannot be read: {error}")]
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            [Problem("--hf-checkpoint", folder, "config.json does not hold an object")]
        )
    if problems := [p for key, value in config.items() for p in _type_problem(folder, key, value)]:
        raise ConfigError(problems)
    return config


def _type_problem(folder: str, key: str, value: Any) -> list[Problem]:
    """Whether a value is of a kind that the rest of this module can look at."""
    legal, holds = KINDS.get(key, ("", None))
    if value is None or holds is None or holds(value):
        return []
    words = f"config.json: {key} must be {legal}, not {value!r:.200}"
    return [Problem("--hf-checkpoint", folder, words)]


def _family(reader: _Reader, value_head: bool) -> tuple[str, Family]:
    """Raises at once: without a known architecture the other keys have no meaning."""
    names = reader.config.get("architectures") or []
    legal = ", ".join(FAMILIES)
    if value_head:
        names = [VALUE_MODELS.sub("ForCausalLM", str(name)) for name in names]
        legal += ", or these with ForTokenClassification or ForSequenceClassification"
    if len(names) != 1 or names[0] not in FAMILIES:
        reader.refuse(f"architectures {names!r} is not supported; legal values: one of {legal}")
        raise ConfigError(reader.problems)
    family = FAMILIES[names[0]]
    model_type = reader.config.get("model_type", family.model_type)
    if model_type != family.model_type:
        reader.refuse(
            f"model_type {model_type!r} does not go with {names[0]}; it must be {family.model_type!r}"
        )
    for key in (*REQUIRED, *family.required):
        if reader.config.get(key) is None:
            reader.refuse(f"{key} is missing")
    if reader.problems:
        raise ConfigError(reader.problems)
    return names[0], family


def _check_keys(reader: _Reader, family: Family) -> None:
    mapped = MAPPED | (family.moe.keys if family.moe is not None else set())
    mapped |= {"qkv_bias"} if family.qkv_bias else set()
    mapped |= deepseek.KEYS if family.deepseek else set()
    if family.qkv_bias and reader.config.get("qkv_bias") is False:
        reader.refuse(
            "qkv_bias False: this architecture is supported with biases on query, key and value only"
        )
    for key, value in reader.config.items():
        if key in mapped or key in WITHOUT_EFFECT or value in (None, False, [], {}):
            continue
        if key in REFUSED_WHEN_SET:
            reader.refuse(f"{key} {value!r}: {REFUSED_WHEN_SET[key]}")
        else:
            reader.refuse(
                f"{key} {value!r} is unknown and might change the network; if it does not, remove the key from the file"
            )


def _check_windows(reader: _Reader, family: Family) -> None:
    """Sliding windows are refused where some layer would use one; the keys alone, as in Qwen's
    files, are harmless."""
    config = reader.config
    used = (family.windows_by_size or config.get("use_sliding_window")) and config.get(
        "sliding_window"
    ) is not None
    if used and config.get("max_window_layers", 0) < config["num_hidden_layers"]:
        reader.refuse(
            f"sliding_window {config['sliding_window']!r}: sliding windows are not supported"
        )
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds:
        reader.refuse(
            f"layer_types {', '.join(map(repr, sorted(kinds)))}: only 'full_attention' is supported"
        )


def _transformer(reader: _Reader, family: Family) -> dict[str, Any]:
    config = reader.config
    heads, hidden_size = reader.number("num_attention_heads"), reader.number("hidden_size")
    groups = reader.number("num_key_value_heads", default=heads)
    if heads % groups:
        reader.refuse(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    if config.get("head_dim") is None and hidden_size % heads:
        reader.refuse(
            f"num_attention_heads {heads} does not divide hidden_size {hidden_size}, and there is no head_dim"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        reader.refuse(
            f"hidden_act {activation!r} is not supported; legal values: {', '.join(ACTIVATIONS)}"
        )
    dropout = config.get("attention_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        reader.refuse(f"attention_dropout must be in 0 <= x < 1, not {dropout!r}")
        dropout = 0.0
    return {
        "num_layers": reader.number("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": reader.number("head_dim", default=hidden_size // heads),
        "ffn_hidden_size": reader.number("intermediate_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": reader.number("rms_norm_eps", default=1e-6, whole=False),
        "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS.get(activation, "silu"),
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": float(dropout),
        **(moe_settings(reader, family.moe) if family.moe is not None else {}),
        **(deepseek.deepseek_settings(reader) if family.deepseek else {}),
    }


def _latent_rope(transformer: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention has its rotary embedding to itself; the model's is not used."""
    return {"rope_theta": transformer["rotary_base"], "rope_type": "default", "factor": 1.0}


def _gpt(reader: _Reader, head_dim: int, rope: Mapping[str, Any]) -> dict[str, Any]:
    if head_dim % 2:
        reader.refuse(f"head_dim {head_dim} is odd; rotary embeddings turn pairs of dimensions")
    return {
        "vocab_size": reader.number("vocab_size"),
        "max_position_embeddings": reader.number("max_position_embeddings", default=2048),
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": 1.0,
        "use_rope_scaling": rope["rope_type"] == "llama3",
        "rope_scaling_factor": float(rope["factor"]) if rope["rope_type"] == "llama3" else None,
        "rotary_seq_len_interpolation_factor": float(rope["factor"])
        if rope["rope_type"] == "linear"
        else None,
        "untie_embeddings_and_output_weights": not reader.config.get("tie_word_embeddings", False),
    }


def _rope(reader: _Reader) -> dict[str, Any]:
    """rope_theta, rope_type ("default", "linear" or "llama3") and factor, from either generation's
    keys."""
    config = reader.config
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if old and new and old != new:
        reader.refuse("rope_scaling and rope_parameters differ; keep one of them")
    given = dict(new or old)
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_ROPE_THETA
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    legacy_type = given.pop("type", "default")  # the key's name before transformers 4.43
    rope_type = given.pop("rope_type", legacy_type)
    result = {"rope_theta": theta, "rope_type": rope_type, "factor": given.get("factor", 1.0)}
    if partial not in (None, 1, 1.0):
        reader.refuse(f"partial_rotary_factor {partial!r}: partial rotation is not supported")
    if not isinstance(theta, int | float) or theta <= 0:
        reader.refuse(f"rope_theta must be a positive number, not {theta!r}")
        result["rope_theta"] = DEFAULT_ROPE_THETA
    if rope_type not in ROPE_KEYS:
        reader.refuse(
            f"rope_type {rope_type!r} is not supported; legal values: {', '.join(ROPE_KEYS)}"
        )
        return result
    for key in sorted(given.keys() - ROPE_KEYS[rope_type]):
        reader.refuse(f"rope_type {rope_type!r} with {key} {given[key]!r} is not supported")
    if rope_type != "default" and not (
        isinstance(result["factor"], int | float) and result["factor"] >= 1 and "factor" in given
    ):
        reader.refuse(f"rope_type {rope_type!r} needs a factor >= 1, not {given.get('factor')!r}")
        result["factor"] = 1.0
    if rope_type == "llama3":
        for key, only in LLAMA3_FIXED.items():
            if given.get(key) != only:
                reader.refuse(
                    f"rope_type 'llama3' with {key} {given.get(key)!r} is not supported: megatron-core fixes it at {only}"
                )
    return result
