"""Which layers of a network have an indexer that selects keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SparseNetwork(Protocol):
    """The part of TransformerConfig that says so."""

    num_layers: int
    linear_attention_freq: Sequence[int] | None
    index_shared: Sequence[int] | None


def indexer_layers(config: SparseNetwork) -> list[bool]:
    """Whether each decoder layer has an indexer of its own: neither a delta net, nor a layer that
    takes the choice of the layer before it."""
    layers = config.num_layers
    others = (config.linear_attention_freq or [0] * layers, config.index_shared or [0] * layers)
    return [not any(kinds) for kinds in zip(*others, strict=True)]
