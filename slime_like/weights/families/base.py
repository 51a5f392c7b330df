"""What distinguishes one architecture of Hugging Face from another: its keys in config.json, and how
megatron-core's parameters are made of its tensors. Each family is one file here, or one of a user's
with --import-modules; nothing else in the project asks for an architecture by name.
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


def _no_settings(reader: ConfigReader) -> dict[str, Any]:
    return {}


def _none(reader: ConfigReader) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture.

    architecture: as config.json has it under ``architectures``. parameters: megatron-core's
    parameter -> how it is made of Hugging Face tensors, in the network's order; "{layer}" in a name
    is the layer's number, "{expert}" the expert's. required: keys of config.json, beyond those of
    every architecture, that must be there. keys: further ones that are read, or have no effect; any
    other key is an error. qkv_bias, qk_norm: of the attention. windows_by_size: `sliding_window`
    alone switches sliding windows on. settings: further fields of megatron-core's TransformerConfig
    (experts, latent attention), from the keys. other_model_types: of files of other publishers, the
    same otherwise. untrained_layers: how many layers the files have after the model's own, which are
    not read.
    """

    architecture: str
    model_type: str
    parameters: Mapping[str, mappings.Mapping]
    required: tuple[str, ...] = ()
    keys: frozenset[str] = field(default_factory=frozenset)
    qkv_bias: bool = False
    qk_norm: bool = False
    windows_by_size: bool = False
    settings: Callable[[ConfigReader], dict[str, Any]] = _no_settings
    other_model_types: tuple[str, ...] = ()
    untrained_layers: Callable[[ConfigReader], int] = _none


model_families: Registry[ModelFamily] = Registry("architecture")


def register_model_family(family: ModelFamily) -> ModelFamily:
    """Make `family` what --hf-checkpoint's config.json may name. Raises ValueError when its
    architecture is registered already."""
    model_families.add(family.architecture, family)
    return family
