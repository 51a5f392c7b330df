"""Context parallelism for packed sequences: each sequence is split over the ranks of a group, and
attention gathers keys and values.

A sequence is split into 2 * cp chunks of equal length; rank r holds chunks r and 2 * cp - 1 - r of
every sequence, so that all ranks have the same number of rows and, under a causal mask, the same
work. "Natural" rows are all rows of the micro-batch in sequence order; a rank's own rows are in the
same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from slime_like.autograd import AutogradContext

# If the mask of a padded batch has more (query, key) pairs, each sequence is computed separately,
# without such a mask.
MAX_MASK_ELEMENTS = 1 << 24
# query, key, value (batch, length, heads, d), mask -> like query
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def places_over_ranks(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Index of each natural row in the concatenation of the rows of ranks 0 .. cp - 1.

    Args:
        cu_seqlens: [S + 1]; sequence lengths are multiples of 2 * cp.

    Returns:
        [T] int64.
    """
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    assert not bool((lengths % (2 * cp_size)).any()), (
        f"sequence lengths {lengths.tolist()} are not multiples of 2 * {cp_size}"
    )
    rows = torch.arange(int(bounds[-1]), device=cu_seqlens.device)
    start = bounds[:-1].repeat_interleave(lengths)
    chunk_length = (lengths // (2 * cp_size)).repeat_interleave(lengths)
    chunk = (rows - start) // chunk_length
    offset = (rows - start) % chunk_length
    # Zig-zag: chunks c < cp and 2 * cp - 1 - c belong to rank c. Under a causal mask an early chunk
    # attends to few keys and its mirror image to many, so that all pairs cost the same; with
    # contiguous shards rank 0 would wait for the last rank.
    second = chunk >= cp_size
    rank = torch.where(second, 2 * cp_size - 1 - chunk, chunk)
    return (
        rank * (rows.numel() // cp_size)
        + start // cp_size
        + offset
        + torch.where(second, chunk_length, 0)
    )


def rows_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Natural rows held by rank `cp_rank`, ascending: [T / cp] int64."""
    share = int(cu_seqlens[-1]) // cp_size
    return places_over_ranks(cu_seqlens, cp_size).argsort()[cp_rank * share : (cp_rank + 1) * share]


class _GatherContext(AutogradContext, Protocol):
    group: dist.ProcessGroup


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatherContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: _GatherContext, grad: Tensor) -> tuple[Tensor, None]:
        shard = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(shard, grad.contiguous(), group=ctx.group)
        return shard, None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather [n, ...] to [cp * n, ...]. Backward reduce-scatters the gradients."""
    gathered: Tensor = _GatherRows.apply(x, group)
    return gathered


def rows_for_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all from a rank's rows [n, c, ...] to the rows of all ranks, in rank order, and its
    share of the columns, [ranks * n, c / ranks, ...]."""
    outgoing = x.unflatten(1, (group.size(), -1)).transpose(0, 1)  # by receiving rank
    received: Tensor = all_to_all(group, outgoing)
    return received.flatten(0, 1)


def columns_for_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `rows_for_columns`."""
    received: Tensor = all_to_all(group, x.unflatten(0, (group.size(), -1)))
    return received.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class PaddedChunk:
    """The first or second chunk of all S sequences of a rank, padded to a batch with H queries and
    K keys."""

    queries: Tensor  # [S, H] indices into the rank's own rows
    keys: Tensor  # [S, K] indices into natural rows
    mask: Tensor  # [S, 1, H, K] bool: which keys a query attends to


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Attention indices of one rank, computed once per micro-batch."""

    natural: Tensor  # [T]: `places_over_ranks`
    # per chunk: own rows [a, b), natural rows [c, d) of the keys that they attend to
    spans: tuple[tuple[int, int, int, int], ...]
    padded: tuple[PaddedChunk, ...] = ()  # the two chunks; empty: compute each span separately
    # [T / cp]: index of each own row in the flattened outputs of the padded chunks
    scatter: Tensor | None = None


def context_rows(cu_seqlens: Tensor, cp_size: int, cp_rank: int, *, batched: bool) -> ContextRows:
    """Build the attention indices of one rank. batched: whether the sequence lengths are similar
    enough to pad them into one batch."""
    natural = places_over_ranks(cu_seqlens, cp_size)
    spans = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        length = (end - start) // (2 * cp_size)
        for i, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            own = start // cp_size + i * length
            spans.append((own, own + length, start, start + (chunk + 1) * length))
    num_seqs = len(spans) // 2
    queries = max(b - a for a, b, _, _ in spans)
    keys = max(d - c for _, _, c, d in spans)
    if not batched or num_seqs == 1 or num_seqs * queries * keys > MAX_MASK_ELEMENTS:
        return ContextRows(natural, tuple(spans))
    device = cu_seqlens.device
    padded = tuple(_padded_chunk(torch.tensor(spans[i::2], device=device)) for i in (0, 1))
    scatter = _scatter_index(padded, natural.numel() // cp_size)
    return ContextRows(natural, tuple(spans), padded, scatter)


def _padded_chunk(spans: Tensor) -> PaddedChunk:
    """Pad one chunk of each sequence. spans: [S, 4]. Padding repeats the last query or key of the
    chunk; padded keys are masked, and outputs of padded queries are not used."""
    first, last, key_first, key_last = spans.unsqueeze(2).unbind(1)  # [S, 1] each
    query_columns = torch.arange(int((last - first).max()), device=spans.device)
    key_columns = torch.arange(int((key_last - key_first).max()), device=spans.device)
    # a chunk ends with its last key, so query j of n attends to all keys but the last n - 1 - j
    # [S, H]: index of the last key that the query attends to
    last_visible = (key_last - key_first) - (last - first) + query_columns
    mask = key_columns <= torch.minimum(last_visible, key_last - key_first - 1).unsqueeze(2)
    return PaddedChunk(
        queries=torch.minimum(first + query_columns, last - 1),
        keys=torch.minimum(key_first + key_columns, key_last - 1),
        mask=mask.unsqueeze(1),
    )


def _scatter_index(padded: tuple[PaddedChunk, ...], own_rows: int) -> Tensor:
    """First index of each own row in the flattened padded chunks."""
    rows = torch.cat([chunk.queries.flatten() for chunk in padded])
    indices = torch.arange(rows.numel(), device=rows.device)
    first = torch.full((own_rows,), rows.numel(), device=rows.device)
    return first.scatter_reduce(0, rows, indices, "amin")


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: ContextRows,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Causal attention of this rank's queries to the keys of their sequences on all ranks of
    `group`. A chunk computes only the keys up to its end.

    Args:
        query: (T / cp, heads, d).
        key: (T / cp, groups, d).
        value: (T / cp, groups, dv).
        attend: Scaled dot-product attention of a batch, with a mask.

    Returns:
        (T / cp, heads, dv).
    """
    keys, values = gather_keys(key, value, rows, group)
    return attend_chunks(query, keys, values, rows, attend)


def gather_keys(
    key: Tensor, value: Tensor, rows: ContextRows, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gather keys (T / cp, groups, d) and values (T / cp, groups, dv) of all ranks to natural rows,
    (T, ...)."""
    parts = [key.flatten(1), value.flatten(1)]
    gathered = gather_rows(torch.cat(parts, dim=1), group)[rows.natural]  # (T, groups * (d + dv))
    columns = gathered.split([part.size(1) for part in parts], dim=1)
    keys, values = (x.unflatten(1, like.shape[1:]) for x, like in zip(columns, (key, value)))
    return keys, values


def attend_chunks(
    query: Tensor, keys: Tensor, values: Tensor, rows: ContextRows, attend: Attend
) -> Tensor:
    """Attention of a rank's queries (T / cp, heads, d) to keys (T, groups, d) and values (T,
    groups, dv) in natural rows. Returns (T / cp, heads, dv)."""
    if rows.scatter is not None:
        outputs = [
            attend(query[c.queries], keys[c.keys], values[c.keys], c.mask) for c in rows.padded
        ]
        return torch.cat([out.flatten(0, 1) for out in outputs])[rows.scatter]
    outputs = []
    for first, last, key_first, key_last in rows.spans:
        mask = causal_lower_right(last - first, key_last - key_first)
        span = attend(
            query[None, first:last],
            keys[None, key_first:key_last],
            values[None, key_first:key_last],
            mask,
        )
        outputs.append(span[0])
    return torch.cat(outputs)
