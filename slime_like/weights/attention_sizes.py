"""Sizes of attention whose heads differ by layer: layers with a sliding window have other numbers
or sizes of them than those without (MiMo-V2-Flash, Gemma 4), values have another size than keys
(MiMo-V2-Flash), or those of layers without a window are the keys (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def width(self) -> int:
        """Rows of the projection of queries, keys and values."""
        values = self.value_dim if self.projected_values else 0
        return self.heads * self.head_dim + self.groups * (self.head_dim + values)

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
    )


def layers_of(config: TransformerConfig) -> tuple[AttentionSizes, ...]:
    """Sizes of every layer of a SizedConfig; empty for other networks."""
    if not hasattr(config, "window_groups"):
        return ()
    return tuple(attention_sizes(config, windowed=window) for window in windowed_layers(config))
