"""Mappings of files that have a layer's experts as one tensor: gpt-oss, Qwen3-VL-MoE, Granite,
Gemma 4, Step-3.5."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from slime_like.weights.mappings import ExpertSlice, Mapping, Sizes, TensorPart, shard_bounds

S = TypeVar("S", bound="StackedExpert")


@dataclass(frozen=True)
class StackedExpert(Mapping):
    """One expert's parameter, in files with one tensor for all experts of a layer: transposed
    weights [experts, columns, rows], weights [experts, rows, columns], or biases [experts, rows].
    All experts of the layer together make up the tensor."""

    hf: str
    bias: bool = False
    expert: int = 0
    rows_first: ClassVar[bool] = False  # the order of a weight's dimensions

    def at(self: S, layer: int, expert: int = 0) -> S:
        return dataclasses.replace(self, hf=self.hf.format(layer=layer), expert=expert)


@dataclass(frozen=True)
class StackedGateUp(StackedExpert):
    """Gate and up projection: interleaved rows in the file, stacked here."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        columns = () if self.bias else (sizes.hidden,)
        return {self.hf: (sizes.experts, *columns, 2 * sizes.expert_ffn)}

    def shard_shape(self, sizes: Sizes, rows: int) -> tuple[int, ...]:
        return (rows,) if self.bias else (rows, sizes.hidden)

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        share = shard_bounds(sizes.expert_ffn, tp_rank, tp_size)
        return [TensorPart(self.hf, *share, ExpertSlice(self.expert, first, 2)) for first in (0, 1)]


@dataclass(frozen=True)
class StackedGateUpHalves(StackedGateUp):
    """Gate and up projection, the gate's columns first."""

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        start, stop = shard_bounds(sizes.expert_ffn, tp_rank, tp_size)
        whole = ExpertSlice(self.expert, rows_first=self.rows_first)
        return [
            TensorPart(self.hf, start + first, stop + first, whole)
            for first in (0, sizes.expert_ffn)
        ]


@dataclass(frozen=True)
class StackedDown(StackedExpert):
    """Projection back into the residual stream, sharded along the input dimension."""

    dim: ClassVar[int] = 1

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.experts, sizes.expert_ffn, sizes.hidden)}

    def shard_shape(self, sizes: Sizes, rows: int) -> tuple[int, ...]:
        return (sizes.hidden, rows)

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        share = shard_bounds(sizes.expert_ffn, tp_rank, tp_size)
        whole = ExpertSlice(self.expert, rows_first=self.rows_first)
        return [TensorPart(self.hf, *share, whole)]


@dataclass(frozen=True)
class StackedDownBias(StackedExpert):
    """The bias of that projection, replicated on every tensor-parallel rank."""

    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.experts, sizes.hidden)}

    def shard_shape(self, sizes: Sizes, rows: int) -> tuple[int, ...]:
        return (rows,)

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, sizes.hidden, ExpertSlice(self.expert))]


@dataclass(frozen=True)
class GateUpRows(StackedGateUpHalves):
    """Gate and up projection [experts, rows, columns], the gate's rows first."""

    rows_first: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.experts, 2 * sizes.expert_ffn, sizes.hidden)}


@dataclass(frozen=True)
class GateAndUpRows(StackedGateUp):
    """Gate and up projection in a tensor each, [experts, rows, columns]."""

    up: str = field(default="", kw_only=True)

    def at(self, layer: int, expert: int = 0) -> GateAndUpRows:
        own = super().at(layer, expert)
        return dataclasses.replace(own, up=self.up.format(layer=layer))

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys((self.hf, self.up), (sizes.experts, sizes.expert_ffn, sizes.hidden))

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        share = shard_bounds(sizes.expert_ffn, tp_rank, tp_size)
        whole = ExpertSlice(self.expert, rows_first=True)
        return [TensorPart(name, *share, whole) for name in (self.hf, self.up)]


@dataclass(frozen=True)
class DownRows(StackedDown):
    """Projection back into the residual stream [experts, rows, columns]."""

    rows_first: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.experts, sizes.hidden, sizes.expert_ffn)}
