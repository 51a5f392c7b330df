"""Sizes of attention whose heads differ by layer: layers with a sliding window have other numbers
or sizes of them than those without (MiMo-V2-Flash, Gemma 4, Step-3.5), values have another size
than keys (MiMo-V2-Flash), those of layers without a window are the keys (Gemma 4 31B), or the last
layers have no keys and values of their own (Gemma 4 E2B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def windowed_layers(config: TransformerConfig) -> list[bool]:
    """Whether each layer has a sliding window, as set by `arguments.hf.windows`."""
    if config.window_size is None:
        return [False] * config.num_layers
    used = config.window_attn_skip_freq
    return [True] * config.num_layers if used is None else [bool(window) for window in used]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of one layer's attention."""

    heads: int
    groups: int
    head_dim: int  # of queries and keys
    value_dim: int
    projected_values: bool  # otherwise the values are the keys
    sinks: bool
    windowed: bool = False
    # attends to the keys and values of the last layer of its kind that has some
    reads_keys: bool = False
    lends_keys: bool = False
    gated: bool = False  # the output of each head is multiplied by a gate

    @property
    def width(self) -> int:
        """Rows of the projection of queries, gates, keys and values."""
        queries = self.heads * (self.head_dim + self.gated)
        if self.reads_keys:
            return queries
        values = self.value_dim if self.projected_values else 0
        return queries + self.groups * (self.head_dim + values)

    @property
    def output(self) -> int:
        return self.heads * self.value_dim


def attention_sizes(config: TransformerConfig, *, windowed: bool) -> AttentionSizes:
    """Sizes of a layer with or without a sliding window, of any grouped-query attention."""

    def own(name: str, other: int) -> int:
        found = getattr(config, f"window_{name}", None) if windowed else None
        return other if found is None else int(found)

    head_dim = own("channels", config.kv_channels)
    sinks = config.softmax_type == "learnable"
    return AttentionSizes(
        heads=own("heads", config.num_attention_heads),
        groups=own("groups", config.num_query_groups or config.num_attention_heads),
        head_dim=head_dim,
        value_dim=getattr(config, "value_channels", None) or head_dim,
        projected_values=windowed or not getattr(config, "keys_are_values", False),
        sinks=sinks and (windowed or not getattr(config, "sinks_of_windows", False)),
        windowed=windowed,
        gated=getattr(config, "head_gates", False),
    )


def layers_of(config: TransformerConfig) -> tuple[AttentionSizes, ...]:
    """Sizes of every layer of a SizedConfig; empty for other networks."""
    if not hasattr(config, "window_groups"):
        return ()
    windows = windowed_layers(config)
    first = len(windows) - config.shared_key_layers
    lenders = lending_layers(windows, config.shared_key_layers)
    return tuple(
        replace(
            attention_sizes(config, windowed=window),
            reads_keys=layer >= first,
            lends_keys=layer in lenders,
        )
        for layer, window in enumerate(windows)
    )


def lending_layers(windows: Sequence[bool], sharing: int) -> set[int]:
    """The layers whose keys and values the last `sharing` ones use: of each kind, with a window or
    without, the last one before them. Fewer than the kinds of those if a kind has none."""
    first = len(windows) - sharing
    last = {window: layer for layer, window in enumerate(windows[:first])}
    return {last[window] for window in windows[first:] if window in last}
