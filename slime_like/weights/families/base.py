"""Interface of a model family: the keys of its config.json, and the mapping from Hugging Face
tensors to megatron-core parameters. Each family is one file here, or a user's file with
--import-modules; no other code depends on an architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_like.registry import Registry
from slime_like.weights import mappings

# The start of names, in megatron-core and in most Hugging Face files.
ATTENTION, HF_ATTENTION = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.self_attn"
MLP, HF_MLP = "decoder.layers.{layer}.mlp", "model.layers.{layer}.mlp"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
LM_HEAD = "lm_head.weight"  # Hugging Face's name of it


class ConfigReader(Protocol):
    """config.json, and what is wrong with it; implemented by arguments/hf/model.py."""

    config: dict[str, Any]

    def refuse(self, message: str) -> None:
        """Note a problem: the file is not read."""

    def number(self, key: str, default: float | None = None, *, whole: bool = True) -> Any:
        """A positive number; `default` where the key is absent or null."""


def _none(reader: ConfigReader) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """Layers of multi-token prediction in a file.

    layer: how the names of one begin, with "{layer}" for its number. layers: the same of
    the model's own layers. after_the_last: whether they are numbered after these, or
    from 0. parameters: what a layer has beyond a transformer layer, by our name within it, under
    names of the file that are made as those of its layers. copies: what a file may repeat, by the
    name of the model's own tensor. count: of a file.
    """

    layer: str
    parameters: Mapping[str, mappings.Mapping]
    layers: str = "model.layers.{layer}"
    after_the_last: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[ConfigReader], int] = _none


def _no_prefixes(reader: ConfigReader) -> tuple[str, ...]:
    return ()


def _no_settings(reader: ConfigReader) -> dict[str, object]:
    return {}


def half_rotary(reader: ConfigReader) -> float:
    """Of GLM's files that do not say it."""
    return 0.5


def every_layer(reader: ConfigReader) -> list[bool]:
    """Windows wherever `sliding_window` is set."""
    return [True] * int(reader.number("num_hidden_layers"))


def after_max_window_layers(reader: ConfigReader) -> list[bool]:
    """Windows as Qwen's files switch them on; 28 is transformers' default."""
    first = 28 if (given := reader.config.get("max_window_layers")) is None else given
    used = bool(reader.config.get("use_sliding_window"))
    return [used and layer >= first for layer in range(reader.number("num_hidden_layers"))]


WINDOWS = frozenset({"full_attention", "sliding_attention"})  # what `layer_types` may then have


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture.

    architecture: as config.json has it under ``architectures``. parameters: megatron-core's
    parameter -> how it is made of Hugging Face tensors, in the network's order; "{layer}" in a name
    is the layer's number, "{expert}" the expert's. required: keys of config.json, beyond those of
    every architecture, that must be there. keys: further ones that are read, or have no effect; any
    other key is an error. qkv_bias, qk_norm: of the attention; `settings` may say otherwise of
    one file, which then lacks these parameters. rotary_percent: the share of a head's dimensions that
    is rotated in files without `partial_rotary_factor`; None: all, and another one is refused.
    windows: which layers have a sliding window in files without `layer_types`; None: windows are
    refused. settings: further fields of
    megatron-core's TransformerConfig (experts, latent attention), from the keys. other_model_types: of files of other publishers, the
    same otherwise. untrained_layers: how many layers the files have after the model's own, which are
    not read. untrained_prefixes: how names of other weights begin that are not read, where the files
    have some; unused_weights: the same of one file. layer_types: what the file's key of this name may have; beyond "full_attention" the
    family's settings say which layer is which. text_config: whether the language model's keys are in
    that object of the file. stand_ins: a required key -> the key that is read where it is absent.
    rope_theta: where the file has none, transformers' default_theta.
    published: how the names of published models begin.
    same_as: the model_type of transformers' class of this function, where it has none of this name.
    prediction: how the files have layers of multi-token prediction, where they can be trained.
    tiny: keys of a tiny model's config.json beyond those of every family
    (scripts/make_tiny_model.py).
    """

    architecture: str
    model_type: str
    parameters: Mapping[str, mappings.Mapping]
    required: tuple[str, ...] = ()
    keys: frozenset[str] = field(default_factory=frozenset)
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_percent: Callable[[ConfigReader], float] | None = None
    windows: Callable[[ConfigReader], list[bool]] | None = None
    settings: Callable[[ConfigReader], dict[str, Any]] = _no_settings
    other_model_types: tuple[str, ...] = ()
    untrained_layers: Callable[[ConfigReader], int] = _none
    text_config: bool = False
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    published: tuple[str, ...] = ()
    tiny: Mapping[str, object] = field(default_factory=dict)
    untrained_prefixes: tuple[str, ...] = ()
    unused_weights: Callable[[ConfigReader], tuple[str, ...]] = _no_prefixes
    layer_types: frozenset[str] = frozenset({"full_attention"})
    same_as: str | None = None
    rope_theta: float = 10000.0
    prediction: PredictionNames | None = None


model_families: Registry[ModelFamily] = Registry("architecture")


def register_model_family(family: ModelFamily) -> ModelFamily:
    """Register a model family for --hf-checkpoint. Raises ValueError if its architecture is
    registered already."""
    model_families.add(family.architecture, family)
    return family
