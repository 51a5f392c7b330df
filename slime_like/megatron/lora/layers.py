"""LoRA for parallel linear layers: the term scale * lora_B (lora_A x) of the output.

Tensor-parallel ranks communicate [tokens, rank] tensors, never hidden states. How the factors are
sharded:

    column-parallel (query, key, value; gate, up)    lora_A replicated; lora_B: rows of this rank
    row-parallel (attention output, down)            lora_A: columns of this rank; lora_B replicated
    output layer                                     lora_A replicated; lora_B: vocabulary of this
                                                     rank
    replicated (MLA's down-projections               both replicated
    of Transformer Engine)

Without sequence parallelism every rank has the full gradient of a replicated factor. With it, a
rank only sees its tokens; in an expert only its part of the output or input, and at the output
layer only its part of the vocabulary. Those gradients are summed over the ranks when gradients are
finalised (`needs_sum`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from slime_like.megatron.lora.targets import OutputPiece


@dataclass(frozen=True, slots=True)
class Ranks:
    """The tensor-parallel ranks of a layer."""

    group: dist.ProcessGroup
    size: int
    sequence_parallel: bool
    expert: bool  # the layer's partial outputs are summed by the token dispatcher

    @property
    def exchange(self) -> bool:
        """Whether the layer itself communicates."""
        return self.size > 1 and not self.expert

    def needs_sum(self, *, at_head: bool = False) -> bool:
        """Whether a replicated factor has partial gradients, to be summed over the ranks."""
        return self.size > 1 and (self.sequence_parallel or self.expert or at_head)


@dataclass(frozen=True, slots=True)
class ColumnLora:
    """LoRA of a column-parallel layer, which may fuse several modules."""

    first: Sequence[Tensor]  # lora_A [rank, in] per module
    second: Sequence[Tensor]  # lora_B [out / tp, rank] per module
    order: Sequence[OutputPiece]  # pieces of the fused output
    scale: float
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in], input of the layer; under sequence parallelism this rank's tokens. Returns
        [..., out / tp] over all tokens."""
        rank = self.first[0].size(0)
        first = torch.cat(list(self.first)) if len(self.first) > 1 else self.first[0]
        low = _matmul(x, first)  # [..., modules * rank]
        if self.ranks.exchange:
            if self.ranks.sequence_parallel:
                low = gather_from_sequence_parallel_region(
                    low, tensor_parallel_output_grad=True, group=self.ranks.group
                )
            else:
                low = copy_to_tensor_model_parallel_region(low, group=self.ranks.group)
        outputs = [
            _matmul(part, second)
            for part, second in zip((low * self.scale).split(rank, -1), self.second, strict=True)
        ]
        if len(self.order) == 1:
            return outputs[0]
        return _join_pieces(outputs, self.order, -1)

    def delta(self) -> Tensor:
        """The update of the layer's weight, [out / tp, in] float32."""
        products = [
            _product(a, b, self.scale) for a, b in zip(self.first, self.second, strict=True)
        ]
        return _join_pieces(products, self.order, 0)


@dataclass(frozen=True, slots=True)
class RowLora:
    """LoRA of a row-parallel layer."""

    first: Tensor  # lora_A [rank, in / tp]
    second: Tensor  # lora_B [out, rank]
    scale: float
    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in / tp]. Returns [..., out]; under sequence parallelism for this rank's tokens,
        in an expert the partial sum of this rank."""
        low = _matmul(x, self.first)
        if self.ranks.exchange:
            if self.ranks.sequence_parallel:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self.ranks.group)
            else:
                low = reduce_from_tensor_model_parallel_region(low, group=self.ranks.group)
        return _matmul(low * self.scale, self.second)

    def delta(self) -> Tensor:
        return _product(self.first, self.second, self.scale)


@dataclass(frozen=True, slots=True)
class ReplicatedLora:
    """LoRA of a layer that every rank has whole, for its tokens."""

    first: Tensor  # lora_A [rank, in]
    second: Tensor  # lora_B [out, rank]
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return _matmul(_matmul(x, self.first) * self.scale, self.second)

    def delta(self) -> Tensor:
        return _product(self.first, self.second, self.scale)


@dataclass(frozen=True, slots=True)
class HeadLora:
    """LoRA of the output layer, merged into the weight passed to fused_linear_logprob.py."""

    first: Tensor  # lora_A [rank, hidden]
    second: Tensor  # lora_B [vocab_padded / tp, rank]
    scale: float

    def __call__(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.second @ self.first)

    def delta(self) -> Tensor:
        return _product(self.first, self.second, self.scale)


Lora = ColumnLora | RowLora | ReplicatedLora | HeadLora


def _product(first: Tensor, second: Tensor, scale: float) -> Tensor:
    """The update of a weight, scale * lora_B lora_A, in float32."""
    return scale * (second.float() @ first.float())


def _join_pieces(outputs: Sequence[Tensor], order: Sequence[OutputPiece], dim: int) -> Tensor:
    """Concatenate pieces of the modules' outputs along `dim`; zeros for modules without LoRA."""
    pieces = []
    for piece in order:
        length = piece.stop - piece.start
        if piece.module is None:
            shape = list(outputs[0].shape)
            shape[dim] = length
            pieces.append(outputs[0].new_zeros(shape))
        else:
            pieces.append(outputs[piece.module].narrow(dim, piece.start, length))
    return torch.cat(pieces, dim)


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T over the last dimension as one 2D matmul. For 3D inputs torch.nn.functional.linear
    selects another kernel when a gradient is needed, but the log-probs of the update must equal
    those of the forward-only pass bit by bit."""
    return torch.mm(x.reshape(-1, x.size(-1)), weight.t()).view(*x.shape[:-1], weight.size(0))
