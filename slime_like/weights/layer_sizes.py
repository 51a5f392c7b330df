"""Mappings of attention whose heads differ by layer; see attention_sizes.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from slime_like.weights.mappings import (
    QKV,
    GatedMLP,
    HeadParallel,
    OfLayer,
    Replicated,
    RowParallel,
    Sizes,
    TensorPart,
    shard_bounds,
)


def of_layer(sizes: Sizes, layer: int) -> Sizes:
    """The sizes with those of one layer's heads."""
    own = sizes.attention[layer]
    ffn = sizes.ffn_of_readers if own.reads_keys else sizes.ffn
    return dataclasses.replace(
        sizes, heads=own.heads, groups=own.groups, head_dim=own.head_dim, ffn=ffn
    )


@dataclass(frozen=True)
class OfSizes(OfLayer):
    """The mapping that follows among the bases, with the sizes of its layer."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return super().hf_shapes(of_layer(sizes, self.layer))  # type: ignore[safe-super]

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        own = of_layer(sizes, self.layer)
        return super().parts(own, tp_rank, tp_size, rows)  # type: ignore[safe-super]


@dataclass(frozen=True)
class SizedQKV(OfLayer, QKV):
    """Query, key and value projections of a layer with its own sizes. Where the values are the
    keys, the file has no projection of them, and where the keys are another layer's, of neither.
    Tensor-parallel ranks have whole groups."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        own = sizes.attention[self.layer]
        rows = {self.query: own.heads * own.head_dim}
        if not own.reads_keys:
            rows[self.key] = own.groups * own.head_dim
        if own.projected_values and not own.reads_keys:
            rows[self.value] = own.groups * own.value_dim
        return {name: (out,) if self.bias else (out, sizes.hidden) for name, out in rows.items()}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        groups = sizes.attention[self.layer].groups
        first, last = shard_bounds(groups, tp_rank, tp_size)
        return [part for group in range(first, last) for part in self._group(sizes, group)]

    def _group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        own = sizes.attention[self.layer]
        queries = own.heads // own.groups * own.head_dim
        yield TensorPart(self.query, group * queries, (group + 1) * queries)
        if own.reads_keys:
            return
        yield TensorPart(self.key, group * own.head_dim, (group + 1) * own.head_dim)
        if own.projected_values:
            yield TensorPart(self.value, group * own.value_dim, (group + 1) * own.value_dim)


@dataclass(frozen=True)
class SizedGatedQKV(SizedQKV):
    """The same with a gate for each head, behind the queries of its group."""

    gate: str = field(default="", kw_only=True)

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        heads = sizes.attention[self.layer].heads
        return {**super().hf_shapes(sizes), self.gate: (heads, sizes.hidden)}

    def _group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        own = sizes.attention[self.layer]
        queries, *others = super()._group(sizes, group)
        heads = own.heads // own.groups
        yield queries
        yield TensorPart(self.gate, group * heads, (group + 1) * heads)
        yield from others


@dataclass(frozen=True)
class SizedOutput(OfLayer, RowParallel):
    """The projection of such a layer's heads back into the residual stream."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.hidden, sizes.attention[self.layer].output)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        output = sizes.attention[self.layer].output
        return [TensorPart(self.hf, *shard_bounds(output, tp_rank, tp_size))]


@dataclass(frozen=True)
class SizedMLP(OfSizes, GatedMLP):
    """The MLP of such a layer."""


@dataclass(frozen=True)
class SizedDown(OfSizes, RowParallel):
    """Its projection back into the residual stream."""


@dataclass(frozen=True)
class SizedSinks(OfSizes, HeadParallel):
    """A number for each head of such a layer."""


@dataclass(frozen=True)
class SizedHeadNorm(OfSizes, Replicated):
    """The norm of queries or keys of such a layer, by head."""
