"""Translate a Hugging Face config.json into megatron-core settings.

Every key is either mapped, known not to affect the model's function, or rejected by name: ignoring
an unknown key could train another model than the checkpoint's. The formats of transformers 4
(`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`) are both supported.

Not supported, and therefore rejected: projection biases that a family does not have, quantised
weights in formats other than those of quantization.py, and the rope types dynamic and longrope.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arguments.hf.config_keys import (
    ACTIVATIONS,
    CONFIG_TYPES,
    DTYPES,
    LARGEST,
    MAPPED,
    REFUSED_WHEN_SET,
    REQUIRED,
    UNSUPPORTED,
    WITHOUT_EFFECT,
)
from arguments.hf.hub import download_hint
from arguments.hf.quantization import read_quantization
from arguments.hf.rope import Rope, read_rope
from arguments.hf.windows import read_windows
from slime_like.checked_json import problems_of
from slime_like.checkpoints.files import read_json
from slime_like.config import ConfigError, Problem
from slime_like.weights.families import ModelFamily, model_families


@dataclass(frozen=True, slots=True)
class HfModel:
    """A model described by config.json."""

    architecture: str  # e.g. "LlamaForCausalLM"
    model_type: str  # e.g. "llama"
    # TransformerConfig field -> value; `activation_func` is a name ("silu"), not a callable
    transformer: dict[str, Any]
    gpt: dict[str, Any]  # GPTModelConfig field -> value
    dtype: str | None  # dtype of the stored weights, e.g. "bfloat16"; None if not given
    untrained_layers: int = 0  # number of additional layers in the files after the model's own
    untrained_prefixes: tuple[str, ...] = ()  # name prefixes of other weights that are not read
    # number of multi-token prediction layers; they are read if the run trains them
    prediction_layers: int = 0


class UnsupportedNetwork(ConfigError):
    """The architecture is known but not supported. No other problems are reported, since they would
    only follow from this one."""


# keys for which null does not mean that the file leaves them out
OFF_IF_NULL = ("sliding_window", "q_lora_rank", "head_dim")
VALUE_MODELS = re.compile(r"For(?:Token|Sequence)Classification$")


@dataclass(slots=True)
class _Reader:
    """config.json, and the problems found in it."""

    folder: str
    config: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, message: str) -> None:
        self.problems.append(Problem("--hf-checkpoint", self.folder, f"config.json: {message}"))

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> Any:
        """Read a positive number; `default` if the key is absent or null. If it is invalid, returns
        1 and records a problem."""
        value = self.config.get(key)
        value = default if value is None else value
        kind = int if whole else (int, float)
        if isinstance(value, kind) and not isinstance(value, bool) and 0 < value < LARGEST:
            return value
        self.refuse(f"{key} must be a positive {'integer' if whole else 'number'}, not {value!r}")
        return 1


def read_hf_model(folder: str, *, value_head: bool = False) -> HfModel:
    """Read the model that `folder`/config.json describes.

    value_head: Also accept models with a head that scores tokens (VALUE_MODELS), read as the
    language model with the same transformer. Raises ConfigError (a ValueError) listing everything
    that is unsupported, by key and value.
    """
    reader = _Reader(folder, _read_config(folder))
    architecture, family = _family(reader, value_head)
    _check_keys(reader, family)
    try:
        read_quantization(reader.config.get("quantization_config"))
    except ValueError as error:
        reader.refuse(str(error))
    transformer = _transformer(reader, family)
    if transformer.get("multi_latent_attention"):
        rope = _latent_rope(transformer)
    else:
        rope = read_rope(reader, family.rotary_percent, family.rope_theta)
    transformer |= rope["yarn"] | rope["llama3"]
    gpt = _gpt(reader, head_dim=transformer["kv_channels"], rope=rope)
    if not family.rotary:
        gpt["position_embedding_type"] = "none"
    dtype = reader.config.get("dtype") or reader.config.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        reader.refuse(f"dtype {dtype!r} is not supported; legal values: {', '.join(DTYPES)}")
    if reader.problems:
        raise ConfigError(reader.problems)
    model_type = str(reader.config.get("model_type", family.model_type))
    untrained = family.untrained_layers(reader)
    constants = tuple(family.constants(transformer))
    return HfModel(
        architecture,
        model_type,
        transformer,
        gpt,
        dtype,
        untrained,
        family.untrained_prefixes + family.unused_weights(reader) + constants,
        0 if family.prediction is None else family.prediction.count(reader),
    )


def ties_embeddings(folder: str) -> bool:
    """Whether output layer and embedding of a folder's model share a weight; families differ in
    what a config.json without tie_word_embeddings means. Raises ConfigError as `read_hf_model`."""
    return not read_hf_model(folder).gpt["untie_embeddings_and_output_weights"]


def _read_config(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        what = "no config.json in this folder" if Path(folder).is_dir() else "no such folder"
        message = f"{what}; must be a local folder with a Hugging Face model{download_hint(folder)}"
        raise ConfigError([Problem("--hf-checkpoint", folder, message)])
    try:
        config = read_json(path)
        repr(config)  # messages need it; fails here if nested too deeply
    except (ValueError, OSError, RecursionError) as error:
        message = f"config.json cannot be read: {error}"
        raise ConfigError([Problem("--hf-checkpoint", folder, message)]) from error
    if not isinstance(config, dict):
        message = "config.json must be an object"
        raise ConfigError([Problem("--hf-checkpoint", folder, message)])
    if problems := _type_problems(folder, config):
        raise ConfigError(problems)
    return config


def _type_problems(folder: str, config: Mapping[str, object]) -> list[Problem]:
    """Problems of values that have a type that the rest of this module cannot handle."""
    if isinstance(by_layer := config.get("rope_theta"), list):
        config = {**config, "rope_theta": None, "rope_theta_of_layers": by_layer}
    try:
        CONFIG_TYPES.validate_python(config, strict=True)
    except ValidationError as error:
        messages = [f"config.json: {problem}" for problem in problems_of(error)]
        return [Problem("--hf-checkpoint", folder, message) for message in messages]
    return []


def _family(reader: _Reader, value_head: bool) -> tuple[str, ModelFamily]:
    """The model family of the architecture. Raises immediately if it is unknown, since other keys
    then have no meaning."""
    names = reader.config.get("architectures") or []
    legal = ", ".join(model_families.names())
    if value_head:
        names = [VALUE_MODELS.sub("ForCausalLM", str(name)) for name in names]
        legal += ", or these with ForTokenClassification or ForSequenceClassification"
    if len(names) == 1 and names[0] in UNSUPPORTED and names[0] not in model_families.names():
        missing, nearest = UNSUPPORTED[names[0]]
        message = (
            f"config.json: {names[0]} is not supported: it has {missing}; the nearest family here "
            f"is {nearest}"
        )
        raise UnsupportedNetwork([Problem("--hf-checkpoint", reader.folder, message)])
    if len(names) != 1 or names[0] not in model_families.names():
        reader.refuse(f"architectures {names!r} is not supported; legal values: one of {legal}")
        raise ConfigError(reader.problems)
    family = model_families.get(names[0])
    if family.text_config:
        reader.config = _flat(reader, family)
    meant = family.meant(reader.config)
    reader.config = _given(meant)
    for key, other in family.stand_ins.items():
        if reader.config.get(key) is None:
            reader.config[key] = reader.config.get(other)
    off = {key for key in OFF_IF_NULL if key in meant and meant[key] is None}
    defaults = {key: value for key, value in family.defaults.items() if key not in off}
    reader.config = {**defaults, **_given(reader.config)}
    reader.config = {**family.derived(reader.config), **_given(reader.config)}
    model_type = reader.config.get("model_type", family.model_type)
    if model_type not in (family.model_type, *family.other_model_types):
        reader.refuse(
            f"model_type {model_type!r} does not go with {names[0]}; it must be "
            f"{family.model_type!r}"
        )
    for key in (*REQUIRED, *family.required):
        if reader.config.get(key) is None:
            reader.refuse(f"{key} is missing")
    if reader.problems:
        raise ConfigError(reader.problems)
    return names[0], family


def _flat(reader: _Reader, family: ModelFamily) -> dict[str, Any]:
    """Merge the keys of the language model (text_config) with the top-level keys, which take
    precedence, except that of the end token. Raises immediately on a problem."""
    config = dict(reader.config)
    text = config.pop("text_config", None)
    if text is None:
        if config.get("num_hidden_layers") is None:
            reader.refuse("text_config is missing")
        text = {}  # transformers 4 wrote some of these models without it
    reader.problems += _type_problems(reader.folder, text)
    text_type = text.get("model_type")
    if text_type not in (None, *family.text_config):
        reader.refuse(
            f"text_config with model_type {text_type!r} is not supported; legal values: "
            f"{', '.join(family.text_config)}"
        )
    if reader.problems:
        raise ConfigError(reader.problems)
    # the language model uses its own (no n-gram of a memory crosses it, see ngram_memory.py); the
    # one at the top may be the end of a turn of generation
    of_text = {key: text[key] for key in ("eos_token_id",) if text.get(key) is not None}
    return {**text, **_given(config), **of_text}


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without null, which means in these files that the key is absent; in the settings of rotary
    embeddings, too."""
    given = {key: value for key, value in config.items() if value is not None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := given.get(key), dict):
            by_kind = {k: _given(v) if isinstance(v, dict) else v for k, v in rope.items()}
            given[key] = {k: v for k, v in by_kind.items() if v is not None}
    return given


def _check_keys(reader: _Reader, family: ModelFamily) -> None:
    mapped = MAPPED | family.keys | ({"qkv_bias"} if family.qkv_bias else set())
    if family.qkv_bias and reader.config.get("qkv_bias") is False:
        reader.refuse(
            "qkv_bias False: this architecture is supported with biases on query, key and value "
            "only"
        )
    for key, value in reader.config.items():
        if key in mapped or key in WITHOUT_EFFECT or value in (None, False, [], {}):
            continue
        if key in REFUSED_WHEN_SET:
            reader.refuse(f"{key} {value!r}: {REFUSED_WHEN_SET[key]}")
        else:
            reader.refuse(
                f"{key} {value!r} is unknown and might change the network; if it does not, remove "
                "the key from the file"
            )


def _transformer(reader: _Reader, family: ModelFamily) -> dict[str, Any]:
    config = reader.config
    heads = reader.number("num_attention_heads")
    hidden_size = reader.number("hidden_size")
    groups = reader.number("num_key_value_heads", default=heads)
    if heads % groups:
        reader.refuse(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    if config.get("head_dim") is None and hidden_size % heads:
        reader.refuse(
            f"num_attention_heads {heads} does not divide hidden_size {hidden_size}, and there is "
            "no head_dim"
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
        **read_windows(reader, family),
        **family.settings(reader),
    }


def _latent_rope(transformer: Mapping[str, Any]) -> Rope:
    """Rope settings of a model with MLA, which has its own rotary embedding; that of GPTModel is
    not used."""
    return Rope(
        rope_theta=transformer["rotary_base"],
        rope_type="default",
        factor=1.0,
        percent=1.0,
        yarn={},
        llama3={},
    )


def _gpt(reader: _Reader, head_dim: int, rope: Rope) -> dict[str, Any]:
    if int(head_dim * rope["percent"]) % 2:
        reader.refuse(
            f"{rope['percent']:g} of head_dim {head_dim} is odd; rotary embeddings turn pairs of "
            "dimensions"
        )
    factor = rope["factor"]
    kind = rope["rope_type"]
    return {
        "vocab_size": reader.number("vocab_size"),
        "max_position_embeddings": reader.number("max_position_embeddings", default=2048),
        "position_embedding_type": "yarn" if rope["yarn"] else "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": float(rope["percent"]),
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": float(factor) if kind == "llama3" else None,
        "rotary_seq_len_interpolation_factor": float(factor) if kind == "linear" else None,
        "untie_embeddings_and_output_weights": not reader.config.get("tie_word_embeddings", False),
    }
