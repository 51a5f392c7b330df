"""Interface of a model family: the keys of its config.json, and the mapping from Hugging Face
tensors to megatron-core parameters. Each family is one file here, or a user's file with
--import-modules; no other code depends on an architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_like.images.settings import VisionFamily
from slime_like.registry import Registry
from slime_like.weights import mappings

# Prefixes of names in megatron-core and in most Hugging Face files.
ATTENTION = "decoder.layers.{layer}.self_attention"
HF_ATTENTION = "model.layers.{layer}.self_attn"
MLP = "decoder.layers.{layer}.mlp"
HF_MLP = "model.layers.{layer}.mlp"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
LM_HEAD = "lm_head.weight"  # the Hugging Face name


class ConfigReader(Protocol):
    """A config.json and its problems; implemented by arguments/hf/model.py."""

    config: dict[str, Any]

    def refuse(self, message: str) -> None:
        """Report a problem: the file is rejected."""

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> Any:
        """A positive number; `default` where the key is absent or null."""


def _none(reader: ConfigReader) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """Names of multi-token prediction layers in a file."""

    layer: str  # prefix of such a layer, with "{layer}" for its number
    # parameters in addition to those of a transformer layer, by our name within the layer
    parameters: Mapping[str, mappings.Mapping]
    # prefix of the model's own layers, from which the layer's other names are derived
    layers: str = "model.layers.{layer}"
    # numbering continues after the model's own layers; otherwise it starts at 0
    after_the_last: bool = False
    # own tensor of the model -> name under which a file may repeat it
    copies: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[ConfigReader], int] = _none  # number of such layers in a file


def _no_prefixes(reader: ConfigReader) -> tuple[str, ...]:
    return ()


def _unchanged(config: dict[str, Any]) -> dict[str, Any]:
    return config


def _nothing(config: Mapping[str, Any]) -> Mapping[str, object]:
    return {}


def _no_constants(transformer: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    return {}


def _no_settings(reader: ConfigReader) -> dict[str, object]:
    return {}


def require_values(reader: ConfigReader, supported: Mapping[str, object]) -> None:
    """Report keys whose value is neither absent nor the only supported one."""
    for key, legal in supported.items():
        if (value := reader.config.get(key)) not in (None, legal):
            reader.refuse(f"{key} {value!r} is not supported; the only legal value is {legal!r}")


def half_rotary(reader: ConfigReader) -> float:
    """Rotary share of GLM files without `partial_rotary_factor`."""
    return 0.5


def every_layer(reader: ConfigReader) -> list[bool]:
    """A window in every layer if `sliding_window` is set."""
    return [True] * int(reader.number("num_hidden_layers"))


def after_max_window_layers(reader: ConfigReader) -> list[bool]:
    """Layers with a window in Qwen's files."""
    first = reader.config.get("max_window_layers")
    if first is None:
        first = 28  # transformers' default
    used = bool(reader.config.get("use_sliding_window"))
    return [used and layer >= first for layer in range(reader.number("num_hidden_layers"))]


def window_theta(reader: ConfigReader, key: str = "rope_theta", default: float = 10000.0) -> float:
    """rope_theta of the layers with a window, which have plain rotary embeddings, from the keys of
    either version of transformers. key: its name in files of version 4."""
    rope = (reader.config.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = rope.get("rope_theta") or reader.number(key, default, whole=False)
    if rope.get("rope_type", "default") != "default":
        reader.refuse(f"sliding_attention with rope_type {rope['rope_type']!r} is not supported")
    return float(theta)


WINDOWS = frozenset({"full_attention", "sliding_attention"})  # `layer_types` with windows


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture."""

    architecture: str  # value of ``architectures`` in config.json
    model_type: str
    # megatron-core parameter -> mapping from Hugging Face tensors, in the order of the network;
    # "{layer}" in a name is the layer's number, "{expert}" the expert's
    parameters: Mapping[str, mappings.Mapping]
    # required keys of config.json, beyond those of every architecture
    required: tuple[str, ...] = ()
    # other keys that are read or have no effect; any further key is an error
    keys: frozenset[str] = field(default_factory=frozenset)
    # qkv_bias, qk_norm: properties of the attention; `settings` may disable them for a file without
    # these parameters
    qkv_bias: bool = False
    qk_norm: bool = False
    # share of the head dimension that is rotated if a file has no `partial_rotary_factor`; None:
    # everything, and a partial factor is rejected
    rotary_percent: Callable[[ConfigReader], float] | None = None
    # layers with a sliding window if a file has no `layer_types`; None: windows are rejected
    windows: Callable[[ConfigReader], list[bool]] | None = None
    # further fields of TransformerConfig, computed from the keys
    settings: Callable[[ConfigReader], dict[str, object]] = _no_settings
    other_model_types: tuple[str, ...] = ()  # equivalent model types of other publishers
    # number of layers after the model's own that are not loaded
    untrained_layers: Callable[[ConfigReader], int] = _none
    # legal model types of `text_config`, the object of the file with the language model's keys;
    # none: the keys are at the top
    text_config: tuple[str, ...] = ()
    # key -> its value in files that leave it out, as in transformers' class, where that is no
    # default of every family
    defaults: Mapping[str, object] = field(default_factory=dict)
    # required key -> key that is read if it is absent
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    # the keys of a file in which null or 0 has a meaning, before keys that are null are left out
    meant: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    # keys that follow from others of the file, for files that leave them out
    derived: Callable[[Mapping[str, Any]], Mapping[str, object]] = _nothing
    # tensors of integers that a file may have and that follow from its fields of TransformerConfig;
    # such a file is checked, and they are saved as they are
    constants: Callable[[Mapping[str, Any]], Mapping[str, Sequence[int]]] = _no_constants
    published: tuple[str, ...] = ()  # prefixes of the names of published models
    # additional config.json keys of a tiny model (scripts/make_tiny_model.py)
    tiny: Mapping[str, object] = field(default_factory=dict)
    untrained_prefixes: tuple[str, ...] = ()  # name prefixes of other weights that are not loaded
    # further such prefixes, computed for one file
    unused_weights: Callable[[ConfigReader], tuple[str, ...]] = _no_prefixes
    # accepted values of the file's `layer_types`; `settings` maps those other than "full_attention"
    layer_types: frozenset[str] = frozenset({"full_attention"})
    # model type of an equivalent class in transformers, if it has none of this name
    same_as: str | None = None
    rotary: bool = True  # False: attention without position embedding
    rope_theta: float = 10000.0  # transformers' default_theta, for files without one
    # names of the multi-token prediction layers, if they can be trained
    prediction: PredictionNames | None = None
    # the vision tower; a text: what its images would need here, as "needs ..."
    vision: VisionFamily | str | None = None


model_families: Registry[ModelFamily] = Registry("architecture")


def head_name(architecture: str) -> str:
    """The output layer's name in files of a family. Raises ValueError if it is not registered."""
    mapping = model_families.get(architecture).parameters.get(OUTPUT_LAYER)
    return mapping.hf if isinstance(mapping, mappings.VocabParallel) else LM_HEAD


def register_model_family(family: ModelFamily) -> ModelFamily:
    """Register a model family for --hf-checkpoint. Raises ValueError if its architecture is
    registered already."""
    model_families.add(family.architecture, family)
    return family
