"""Mappings between megatron-core parameters and Hugging Face tensors.

A mapping lists, for each tensor-parallel rank, the pieces of Hugging Face tensors that make up the
rank's shard, in order along one dimension. Import copies these pieces into the shard, export copies
gathered shards back into the tensors, so both directions follow from one definition. A per-layer
mapping has "{layer}" in its names; see `Mapping.at`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, TypeVar

from slime_like.ngrams import NgramSettings
from slime_like.weights.attention_sizes import AttentionSizes

if TYPE_CHECKING:
    from torch import Tensor

M = TypeVar("M", bound="Mapping")
L = TypeVar("L", bound="OfLayer")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the full model (not of a shard); mappings refer to them by field or property
    name."""

    hidden: int
    ffn: int
    heads: int
    groups: int  # query groups, which share keys and values
    head_dim: int
    vocab: int  # without padding
    experts: int = 0  # of an expert layer
    expert_ffn: int = 0  # inner size of one expert
    shared_ffn: int = 0  # inner size of the shared expert
    expert_latent: int = 0  # of the projection that experts work on; 0: on the hidden state
    # multi-head latent attention: ranks of the query and key-value compressions, and the number of
    # rotary dimensions
    q_latent: int = 0
    kv_latent: int = 0
    rotary: int = 0
    head_key: int = 0  # per head: query or key without and with rotary dimensions, and the value
    head_value: int = 0
    # gated delta nets: number of key heads, which are the groups of value heads, and head sizes
    delta_groups: int = 0
    delta_heads: int = 0
    delta_key: int = 0
    delta_value: int = 0
    delta_taps: int = 0  # kernel size of the convolution
    # indexer of sparse attention: number of query heads, size of a query head and of the key
    index_heads: int = 0
    index_dim: int = 0
    index_pool: int = 0  # number of keys that it selects as one
    # residual streams of hyper-connections, and the rank of the gates of gated ones
    streams: int = 0
    stream_rank: int = 0
    # by layer, where the heads of layers differ; see layer_sizes.py
    attention: tuple[AttentionSizes, ...] = ()
    ffn_of_readers: int = 0  # inner size of the MLP in layers without keys of their own
    layer_input: int = 0  # size of the input of a layer beside the hidden state, and of all layers
    layer_inputs: int = 0
    memory: NgramSettings | None = None  # of n-grams
    topk: int = 0  # experts of a token
    # compressed attention: by layer tokens of an entry and whether they overlap, and of the output
    # projection all ranks of its groups, and inputs of a group
    entries: tuple[tuple[int, bool], ...] = ()
    grouped_output: int = 0
    query_of_group: int = 0

    @property
    def expert_hidden(self) -> int:
        return self.expert_latent or self.hidden

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def latent_query(self) -> int:
        return self.heads * (self.head_key + self.rotary)

    @property
    def latent_key_value(self) -> int:
        return self.heads * (self.head_key + self.head_value)

    @property
    def latent_value(self) -> int:
        return self.heads * self.head_value

    @property
    def kv_latent_and_rotary(self) -> int:
        return self.kv_latent + self.rotary

    @property
    def delta_output(self) -> int:
        return self.delta_heads * self.delta_value

    @property
    def index_query(self) -> int:
        return self.index_heads * self.index_dim

    @property
    def index_query_key(self) -> int:
        return (self.index_heads + 1) * self.index_dim

    @property
    def stream_channels(self) -> int:
        return self.streams * self.hidden

    @property
    def stream_weights(self) -> int:
        return (2 + self.streams) * self.streams

    @property
    def stream_scales(self) -> int:
        return 3

    @property
    def memory_width(self) -> int:
        return 0 if self.memory is None else self.memory.width

    @property
    def one(self) -> int:
        return 1

    @property
    def key_value(self) -> int:
        return self.groups * self.head_dim


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """Selects one expert's matrix from a tensor with all experts of a layer [experts, columns,
    rows], or from biases [experts, rows]: every `step`th row."""

    expert: int
    offset: int = 0
    step: int = 1
    rows_first: bool = False  # the tensor is [experts, rows, columns]

    def matrix(self, stored: Tensor) -> Tensor:
        """A view [rows / step, columns] of the expert's matrix; of a bias, [rows / step]."""
        rows = stored if self.rows_first or stored.dim() == 1 else stored.transpose(0, 1)
        return rows[self.offset :: self.step]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows [start, stop) of the tensor `hf` along the mapping's dimension; with `hf` None, that
    many padding rows."""

    hf: str | None
    start: int
    stop: int
    expert_slice: ExpertSlice | None = None  # selects a matrix within the tensor

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Mapping(ABC):
    """Base class of mappings.

    For an expert's parameter, "tensor-parallel" means expert-tensor-parallel.
    """

    dim: ClassVar[int] = 0  # the dimension along which shards are cut
    sharded: ClassVar[bool] = True  # False if every rank has the full parameter
    # the parameter is a vector, and the file has it with more dimensions
    flat: ClassVar[bool] = False
    linear: ClassVar[bool] = False  # the weight of a linear layer that can have an adapter
    # integers of the file that never change: not exported, but saved as they were read
    fixed: ClassVar[bool] = False

    @abstractmethod
    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Name and full shape of every Hugging Face tensor involved."""

    @abstractmethod
    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        """The pieces of the shard of `tp_rank`. rows: the shard's length along `dim`; only padding
        depends on it."""

    def shard_shape(self, sizes: Sizes, rows: int) -> tuple[int, ...]:
        """Shape of a shard with `rows` along `dim`."""
        if self.flat:
            return (rows,)
        shape = list(next(iter(self.hf_shapes(sizes).values())))
        shape[self.dim] = rows
        return tuple(shape)

    def at(self: M, layer: int, expert: int = 0) -> M:
        """The mapping with its names filled in for the global layer number `layer` and, in MoE
        layers, `expert` (both from 0)."""
        return _map_names(self, lambda name: name.format(layer=layer, expert=expert))


@dataclass(frozen=True)
class OfLayer(Mapping):
    """A mapping whose shapes depend on its layer."""

    layer: int = field(default=0, kw_only=True)  # the global number, from 0

    def at(self: L, layer: int, expert: int = 0) -> L:
        return dataclasses.replace(super().at(layer, expert), layer=layer)


def rename_prefix(mapping: M, old: str, new: str) -> M:
    """The mapping with the prefix `old` of its Hugging Face names replaced by `new`."""
    return _map_names(
        mapping, lambda name: new + name.removeprefix(old) if name.startswith(old) else name
    )


def _map_names(mapping: M, change: Callable[[str], str]) -> M:
    names = {field.name: getattr(mapping, field.name) for field in dataclasses.fields(mapping)}
    changed = {key: change(name) for key, name in names.items() if isinstance(name, str)}
    return dataclasses.replace(mapping, **changed)


def shard_bounds(total: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Bounds [start, stop) of one rank's equal share of `total` rows."""
    return total * tp_rank // tp_size, total * (tp_rank + 1) // tp_size


@dataclass(frozen=True)
class Replicated(Mapping):
    """A vector replicated on every tensor-parallel rank: norm weights."""

    hf: str
    size: str = "hidden"  # its length, a field of Sizes
    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (getattr(sizes, self.size),)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, getattr(sizes, self.size))]


@dataclass(frozen=True)
class Whole(Mapping):
    """A tensor of any shape that is replicated on every tensor-parallel rank: the vision tower."""

    hf: str
    shape: tuple[int, ...]
    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: self.shape}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, self.shape[0])]


@dataclass(frozen=True)
class ReplicatedRows(Mapping):
    """[rows, columns], replicated on every tensor-parallel rank: a router, the gate of a shared
    expert, an indexer's projection."""

    hf: str
    rows: str  # fields of Sizes
    columns: str = "hidden"  # fields of Sizes
    sharded: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (getattr(sizes, self.rows), getattr(sizes, self.columns))}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, getattr(sizes, self.rows))]


class ReplicatedMatrix(ReplicatedRows):
    """The same, of a matrix that can have no adapter."""

    linear = False


@dataclass(frozen=True)
class TokenExperts(Mapping):
    """A table [vocabulary, topk] of experts by token, on every rank. It is no weight: it is not
    exported, but saved as it was read."""

    hf: str
    sharded: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.vocab, sizes.topk)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, 0, sizes.vocab)]

    def problems(self, table: Tensor, sizes: Sizes) -> list[str]:
        """What is wrong with a table: numbers of no expert, or one expert twice for a token."""
        outside = (table < 0) | (table >= sizes.experts)
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            number = int(table[row, column])
            return [f"{self.hf} has expert {number} of {sizes.experts} for token {row}"]
        in_order = table.sort(dim=1).values
        twice = (in_order[:, 1:] == in_order[:, :-1]).any(1)
        if twice.any():
            row = int(twice.nonzero()[0])
            return [f"{self.hf} has an expert twice for token {row}: {table[row].tolist()}"]
        return []


@dataclass(frozen=True)
class JoinedProjection(Mapping):
    """[hidden, 2 * hidden], replicated on every tensor-parallel rank: projection of an embedding
    and a hidden state, concatenated in this order."""

    hf: str
    hidden_first: bool = False  # the file has the hidden state's columns first
    dim: ClassVar[int] = 1
    sharded: ClassVar[bool] = False

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.hidden, 2 * sizes.hidden)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        halves = [
            TensorPart(self.hf, 0, sizes.hidden),
            TensorPart(self.hf, sizes.hidden, 2 * sizes.hidden),
        ]
        return halves[::-1] if self.hidden_first else halves


@dataclass(frozen=True)
class RowParallel(Mapping):
    """[rows, inner], sharded along the input dimension: a projection back into the residual
    stream."""

    hf: str
    inner: str  # fields of Sizes
    rows: str = "hidden"
    dim: ClassVar[int] = 1
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (getattr(sizes, self.rows), getattr(sizes, self.inner))}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, *shard_bounds(getattr(sizes, self.inner), tp_rank, tp_size))]


@dataclass(frozen=True)
class ColumnParallel(Mapping):
    """[rows, columns], sharded along the output dimension."""

    hf: str
    rows: str  # fields of Sizes
    columns: str = "hidden"  # fields of Sizes
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (getattr(sizes, self.rows), getattr(sizes, self.columns))}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, *shard_bounds(getattr(sizes, self.rows), tp_rank, tp_size))]


@dataclass(frozen=True)
class HeadParallel(Mapping):
    """A vector [heads] with one number per head, sharded by heads."""

    hf: str

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.heads,)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        return [TensorPart(self.hf, *shard_bounds(sizes.heads, tp_rank, tp_size))]


@dataclass(frozen=True)
class VocabParallel(Mapping):
    """[vocab, columns], sharded along the vocabulary: embedding and output layer. megatron-core
    pads the last rows."""

    hf: str
    columns: str = "hidden"  # a field of Sizes

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (sizes.vocab, getattr(sizes, self.columns))}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        start, stop = (min(row, sizes.vocab) for row in (rows * tp_rank, rows * (tp_rank + 1)))
        pieces = [TensorPart(self.hf, start, stop), TensorPart(None, 0, rows - (stop - start))]
        return [part for part in pieces if len(part)]


@dataclass(frozen=True)
class GatedMLP(Mapping):
    """Gate and up projection [inner, hidden], stacked; each rank has its share of both."""

    gate: str
    up: str
    inner: str = "ffn"  # a field of Sizes
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {name: (getattr(sizes, self.inner), sizes.hidden) for name in (self.gate, self.up)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        share = shard_bounds(getattr(sizes, self.inner), tp_rank, tp_size)
        return [TensorPart(self.gate, *share), TensorPart(self.up, *share)]


@dataclass(frozen=True)
class StackedGatedMLP(Mapping):
    """Gate and up projection stored in the file as one tensor [2 * inner, hidden]."""

    hf: str
    inner: str = "ffn"  # a field of Sizes

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {self.hf: (2 * getattr(sizes, self.inner), sizes.hidden)}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        inner = getattr(sizes, self.inner)
        start, stop = shard_bounds(inner, tp_rank, tp_size)
        return [TensorPart(self.hf, start, stop), TensorPart(self.hf, inner + start, inner + stop)]


@dataclass(frozen=True)
class QKV(Mapping):
    """Query, key and value projections, interleaved: for each group its query heads, its key head
    and its value head.

    Weights [out, hidden] or, with bias=True, biases [out]. Shards of the interleaved rows need not
    align with groups: with more ranks than groups, a rank has a part of a group.
    """

    query: str
    key: str
    value: str
    bias: bool = False
    linear: ClassVar[bool] = True

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = {self.query: sizes.query, self.key: sizes.key_value, self.value: sizes.key_value}
        return {name: (out,) if self.bias else (out, sizes.hidden) for name, out in rows.items()}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        start, stop = shard_bounds(sizes.query + 2 * sizes.key_value, tp_rank, tp_size)
        pieces = []
        position = 0
        for block in self._blocks(sizes):
            low = max(start - position, 0)
            high = min(stop - position, len(block))
            if low < high:
                pieces.append(TensorPart(block.hf, block.start + low, block.start + high))
            position += len(block)
        return pieces

    def _blocks(self, sizes: Sizes) -> Iterator[TensorPart]:
        queries = sizes.query // sizes.groups
        head = sizes.head_dim
        for group in range(sizes.groups):
            yield TensorPart(self.query, group * queries, (group + 1) * queries)
            yield TensorPart(self.key, group * head, (group + 1) * head)
            yield TensorPart(self.value, group * head, (group + 1) * head)


@dataclass(frozen=True)
class StackedQKV(QKV):
    """Query, key and value projections, stored in the file as one tensor `query`, stacked in this
    order."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        rows = sizes.query + 2 * sizes.key_value
        return {self.query: (rows,) if self.bias else (rows, sizes.hidden)}

    def _blocks(self, sizes: Sizes) -> Iterator[TensorPart]:
        starts = {self.query: 0, self.key: sizes.query, self.value: sizes.query + sizes.key_value}
        for block in super()._blocks(sizes):
            assert block.hf is not None
            start = starts[block.hf]
            yield TensorPart(self.query, start + block.start, start + block.stop)


@dataclass(frozen=True)
class GatedQKV(QKV):
    """Like QKV, for attention with an output gate. The file has each query head followed by its
    gate; megatron-core has a group's gates between its queries and its key."""

    def hf_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        shapes = super().hf_shapes(sizes)
        return shapes | {self.query: (2 * sizes.query, *shapes[self.query][1:])}

    def parts(self, sizes: Sizes, tp_rank: int, tp_size: int, rows: int) -> list[TensorPart]:
        # megatron-core needs complete groups on each rank if the output has a gate
        groups = range(*shard_bounds(sizes.groups, tp_rank, tp_size))
        return list(chain.from_iterable(self._group(sizes, group) for group in groups))

    def _group(self, sizes: Sizes, group: int) -> Iterator[TensorPart]:
        heads = sizes.heads // sizes.groups
        dim = sizes.head_dim
        for offset in (0, dim):
            for head in range(group * heads, (group + 1) * heads):
                start = 2 * head * dim + offset
                yield TensorPart(self.query, start, start + dim)
        for name in (self.key, self.value):
            yield TensorPart(name, group * dim, (group + 1) * dim)
