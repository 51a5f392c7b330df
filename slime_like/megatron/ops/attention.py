"""Core attention over packed sequences in plain torch, for layers without Transformer Engine.

megatron-core's `DotProductAttention` does not support packed sequences; this module replaces it in
the layer spec. Sequences of similar length are right-padded into one batch (under a causal mask no
real token attends to padding, so no mask tensor is needed). If padding would waste more than it
saves, each sequence is computed separately. Attention never crosses sequences. Under context
parallelism a rank holds only its own rows and gathers keys and values; see context_parallel.py.
"""

from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from slime_like.autograd import AutogradContext
from slime_like.megatron.ops.context_parallel import (
    ContextRows,
    context_parallel_attention,
    context_rows,
    gather_keys,
)
from slime_like.megatron.ops.image_blocks import visible_keys

if TYPE_CHECKING:
    from slime_like.images.rows import ImagePass
    from slime_like.megatron.ops.ahead import AheadRows
    from slime_like.megatron.ops.delta_rule import DeltaRows
    from slime_like.megatron.ops.entries import EntryTables
    from slime_like.megatron.ops.far_rows import FarRows
    from slime_like.megatron.ops.image_blocks import ImageBlocks
    from slime_like.megatron.ops.ngrams import NgramRows
    from slime_like.megatron.ops.side_tensors import SideTensor

# Padding costs S * max(L)^2 instead of sum(L^2); above this factor the sequences are computed
# separately.
MAX_PADDING_FACTOR = 2.0


@dataclass
class PackedRows(PackedSeqParams):
    """megatron-core's description of packed sequences, plus indices that our attention derives from
    it once per micro-batch, on the host. Under context parallelism the lengths are those of the
    full sequences, as Transformer Engine and the rotary embedding expect."""

    lengths: tuple[int, ...] = ()  # S sequence lengths; they sum to T
    # [T]: index of each row in the padded batch, flattened to [S * max L]; None: compute each
    # sequence separately
    padded_indices: Tensor | None = None
    equal: bool = False  # all sequences have the same length, so no padding is needed
    context: ContextRows | None = None  # under context parallelism, instead of padded_indices
    # of networks that need them; see ops/tables.py
    delta: DeltaRows | None = None
    far: FarRows | None = None
    entries: EntryTables | None = None
    ahead: tuple[AheadRows, ...] = ()  # of each prediction layer
    images: ImagePass | None = None
    blocks: ImageBlocks | None = None  # of images within which attention is in both directions
    # layer number -> keys that its indexer selected, see ops/sparse_attention.py
    selected_keys: dict[int, Tensor] = field(default_factory=dict)
    # index of an indexer of this rank -> keys to replay, on the host, see indexer_replay.py; in a
    # dict, so that they stay there. Then the indexers that were compared with them in this pass
    replayed_keys: dict[int, Tensor] = field(default_factory=dict)
    compared_keys: set[int] = field(default_factory=set)
    # what a layer lends to later ones, see ops/side_tensors.py
    sides: dict[str, SideTensor] = field(default_factory=dict)
    # [T / cp] int64 of this rank, and the n-grams that follow; only with a memory of n-grams
    tokens: Tensor | None = None
    ngrams: NgramRows | None = None


def packed_rows(cu_seqlens: Tensor, cp_size: int = 1, cp_rank: int = 0) -> PackedRows:
    """Describe sequences packed at `cu_seqlens` [S + 1] (int32, starting at 0). A context-parallel
    rank holds its chunks of each."""
    bounds = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
    longest = max(lengths)
    rows = PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )
    batched = len(lengths) * longest**2 <= MAX_PADDING_FACTOR * sum(n * n for n in lengths)
    if cp_size > 1:
        rows.context = context_rows(cu_seqlens, cp_size, cp_rank, batched=batched)
    elif len(lengths) * longest == bounds[-1]:
        rows.equal = True
    elif batched:
        real = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)  # (S, max L)
        rows.padded_indices = real.flatten().nonzero().squeeze(1).to(cu_seqlens.device)
    return rows


class _Pad(torch.autograd.Function):
    """Pad rows (T, ...) with zeros to a batch (S, max L, ...). No row is used twice, so backward is
    a plain copy as well; the backward pass of indexing accumulates duplicates, which costs more
    than the attention of short sequences."""

    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, indices: Tensor, batch: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(indices)
        padded = rows.new_zeros(math.prod(batch), *rows.shape[1:])
        return padded.index_copy_(0, indices, rows).unflatten(0, batch)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return gradients[0].flatten(0, 1).index_select(0, indices), None, None


class _UnpadContext(AutogradContext, Protocol):
    batch: tuple[int, ...]


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`: a batch (S, max L, ...) to rows (T, ...)."""

    @staticmethod
    def forward(ctx: _UnpadContext, padded: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.batch = padded.shape[:2]
        return padded.flatten(0, 1).index_select(0, indices)

    @staticmethod
    def backward(ctx: _UnpadContext, *gradients: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        rows = gradients[0]
        padded = rows.new_zeros(math.prod(ctx.batch), *rows.shape[1:])
        return padded.index_copy_(0, indices, rows).unflatten(0, ctx.batch), None


class PackedAttention(MegatronModule):
    """Scaled dot-product attention over packed sequences, with grouped-query attention. It has the
    interface of megatron-core's core_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,  # set by MLA, where keys are wider than values
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        self.cp_group = None if pg_collection is None else pg_collection.cp
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            softmax_scale /= max(1, layer_number)
        self.softmax_scale = softmax_scale
        # how many tokens before its own a query attends to; None: all
        self.before: int | None = None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,  # (T, heads, d), T / cp rows under context parallelism
        key: Tensor,  # (T, groups, d)
        value: Tensor,  # (T, groups, dv); dv = d except for MLA
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # (T, heads * dv)
        assert isinstance(packed_seq_params, PackedRows), (
            "rows are packed by slime_like.megatron.ops.attention.packed_rows"
        )
        assert attention_bias is None and attention_mask is None, "packed rows carry no mask tensor"
        with self._dropout_rng():
            if packed_seq_params.blocks is not None:
                out = self._with_image_blocks(query, key, value, packed_seq_params)
            elif packed_seq_params.context is not None:
                assert self.cp_group is not None, (
                    "the layer spec passes its process groups to the core attention"
                )
                out = context_parallel_attention(
                    query, key, value, packed_seq_params.context, self.cp_group, self._sdpa
                )
            elif packed_seq_params.equal:
                batch = (len(packed_seq_params.lengths), packed_seq_params.lengths[0])
                out = self._sdpa(*(x.unflatten(0, batch) for x in (query, key, value)))
                out = out.flatten(0, 1)
            elif packed_seq_params.padded_indices is not None:
                out = self._padded(query, key, value, packed_seq_params)
            else:
                parts = [x.split(packed_seq_params.lengths) for x in (query, key, value)]
                out = torch.cat(
                    [self._sdpa(q[None], k[None], v[None])[0] for q, k, v in zip(*parts)]
                )
        return out.reshape(out.size(0), -1)

    def _with_image_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows
    ) -> Tensor:
        assert rows.blocks is not None
        if rows.context is not None:
            assert self.cp_group is not None
            key, value = gather_keys(key, value, rows.context, self.cp_group)
        outputs = []
        for span in rows.blocks.spans:
            parts = query[None, span.queries], key[None, span.keys], value[None, span.keys]
            if span.causal:
                causal = causal_lower_right(parts[0].size(1), parts[1].size(1))
                outputs.append(self._sdpa(*parts, causal)[0])
            else:
                mask = visible_keys(rows.blocks, span, self.before)
                outputs.append(PackedAttention._sdpa(self, *parts, mask)[0])
        return torch.cat(outputs)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        indices = rows.padded_indices
        batch = (len(rows.lengths), max(rows.lengths))
        padded = [_Pad.apply(x, indices, batch) for x in (query, key, value)]
        return _Unpad.apply(self._sdpa(*padded), indices)

    def _sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attention over a batch (batch, length, heads, d): causal, or with a mask that broadcasts
        to (batch, heads, queries, keys)."""
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)

    def _dropout_rng(self) -> AbstractContextManager[None]:
        # Tensor-parallel ranks hold different heads and need different dropout; with sequence
        # parallelism the generator is already forked.
        if self.dropout and self.training and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return nullcontext()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Empty: there are no parameters."""
        return {}
