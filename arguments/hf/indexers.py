"""Which layers of a network have an indexer, and what it selects: keys, or compressed entries of
several tokens each."""

from __future__ import annotations

from typing import Any

from slime_like.samples.indexer_topk import most_keys


def indexer_layers(config: Any) -> list[bool]:
    """Whether each decoder layer has an indexer of its own. config: A TransformerConfig.

    Of keys, all layers but delta nets, and those that take the choice of the layer before; of
    entries, those of DeepSeek-V4 that say so.
    """
    layers = config.num_layers
    if hasattr(config, "entry_selection"):
        return [bool(selects) for selects in config.entry_selection]
    others = (config.linear_attention_freq or [0] * layers, config.index_shared or [0] * layers)
    return [not any(kinds) for kinds in zip(*others, strict=True)]


def selection_width(config: Any) -> int:
    """The most keys, or entries, that a query attends to."""
    if hasattr(config, "entry_topk"):
        return int(config.entry_topk)
    return most_keys(config.index_topk, config.index_pool)


def tokens_of_entry(config: Any) -> int:
    """Tokens of what an indexer selects: 1 of keys."""
    rates = getattr(config, "entry_rates", None) or [1]
    selects = getattr(config, "entry_selection", None) or [1]
    return min(rate for rate, selected in zip(rates, selects, strict=False) if selected)
