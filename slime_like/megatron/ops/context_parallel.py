"""Context parallelism: the ranks of a group share the rows of every packed sequence, and attention
gathers keys and values.

A sequence is cut into 2 * cp chunks of equal length; rank r holds chunks r and 2 * cp - 1 - r of
every sequence, so that all ranks have the same number of rows, and under a causal mask the same
work. "Natural" rows are those of the whole micro-batch in the order of its sequences; a rank's own
rows are in that order too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from slime_like.types import AutogradContext, MicroBatch

# Above this many (query, key) pairs in the mask of a padded batch, each sequence is computed alone,
# without such a mask.
MAX_MASK_ELEMENTS = 1 << 24
Attend = Callable[
    [Tensor, Tensor, Tensor, Tensor | None], Tensor
]  # query, key, value (batch, length, heads, d), mask -> like query


def places_over_ranks(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Map natural rows to their places in the concatenation of the rows of ranks 0 .. cp - 1.

    Args:
        cu_seqlens: [S + 1]; every sequence is a multiple of 2 * cp long.

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
    chunk, offset = (rows - start) // chunk_length, (rows - start) % chunk_length
    # Zig-zag: chunk c < cp belongs to rank c, and chunk 2 * cp - 1 - c to the same rank. Under a
    # causal mask an early chunk attends to few keys and its mirror image to many, so that each
    # pair costs the same; contiguous shares would leave rank 0 idle while the last rank computes.
    second = chunk >= cp_size
    rank = torch.where(second, 2 * cp_size - 1 - chunk, chunk)
    return (
        rank * (rows.numel() // cp_size)
        + start // cp_size
        + offset
        + torch.where(second, chunk_length, 0)
    )


def rows_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """The natural rows that rank `cp_rank` holds, ascending: [T / cp] int64."""
    share = int(cu_seqlens[-1]) // cp_size
    return places_over_ranks(cu_seqlens, cp_size).argsort()[cp_rank * share : (cp_rank + 1) * share]


def rows_of_context_rank(batch: MicroBatch, cp_size: int, cp_rank: int) -> MicroBatch:
    """What a context-parallel rank holds of a whole micro-batch."""
    rows = rows_of_rank(batch.cu_seqlens, cp_size, cp_rank)
    held: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor) and f.name != "cu_seqlens":
            by_row = value[0] if value.size(0) == 1 else value
            assert by_row.size(0) == batch.seq_ids.numel(), f"{f.name} is not by row"
            held[f.name] = by_row[rows] if by_row is value else by_row[rows].unsqueeze(0)
    return replace(batch, **held)


def join_context_ranks(values: Tensor, batches: Sequence[MicroBatch], cp_size: int) -> Tensor:
    """Values of all ranks' rows in the order of the whole micro-batches, [n, T] for T rows in all.

    values: [cp_size, n, T / cp_size], each rank's rows of `batches` one micro-batch after another.
    """
    parts = values.split([batch.tokens.numel() for batch in batches], dim=2)
    whole = [
        part.transpose(0, 1).flatten(1)[:, places_over_ranks(b.cu_seqlens, cp_size)]
        for part, b in zip(parts, batches)
    ]
    return torch.cat(whole, dim=1)


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
        mine = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of every rank, one after another: [cp * n, ...]. Backward sums the gradients of all
    ranks."""
    gathered: Tensor = _GatherRows.apply(x, group)
    return gathered


@dataclass(frozen=True, slots=True)
class PaddedChunk:
    """One of a rank's two chunks of all S sequences, padded to a batch with H queries and K keys."""

    queries: Tensor  # [S, H] into the rank's own rows
    keys: Tensor  # [S, K] into natural rows
    mask: Tensor  # [S, 1, H, K] bool: which keys a query sees


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Which rows attend to which, for one rank. Derived once per micro-batch."""

    natural: Tensor  # [T]: `places_over_ranks`
    spans: tuple[
        tuple[int, int, int, int], ...
    ]  # of each chunk: own rows [a, b), natural rows of the keys it sees [c, d)
    padded: tuple[PaddedChunk, ...] = ()  # the two chunks; empty: compute each span alone
    # [T / cp]: place of each own row in the flattened outputs of the padded chunks
    scatter: Tensor | None = None


def context_rows(cu_seqlens: Tensor, cp_size: int, cp_rank: int, *, batched: bool) -> ContextRows:
    """batched: whether the sequences are alike enough in length to be padded into one batch."""
    natural = places_over_ranks(cu_seqlens, cp_size)
    spans = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        length = (end - start) // (2 * cp_size)
        for i, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
            own = start // cp_size + i * length
            spans.append((own, own + length, start, start + (chunk + 1) * length))
    num_seqs = len(spans) // 2
    queries, keys = max(b - a for a, b, _, _ in spans), max(d - c for _, _, c, d in spans)
    if not batched or num_seqs == 1 or num_seqs * queries * keys > MAX_MASK_ELEMENTS:
        return ContextRows(natural, tuple(spans))
    padded = tuple(
        _padded_chunk(torch.tensor(spans[i::2], device=cu_seqlens.device)) for i in (0, 1)
    )
    return ContextRows(
        natural, tuple(spans), padded, _scatter_index(padded, natural.numel() // cp_size)
    )


def _padded_chunk(spans: Tensor) -> PaddedChunk:
    """spans: [S, 4]. A padded query or key repeats the chunk's last; a padded key is masked, a
    padded query's output is not used."""
    first, last, key_first, key_last = spans.unsqueeze(2).unbind(1)  # [S, 1] each
    query_columns = torch.arange(int((last - first).max()), device=spans.device)
    key_columns = torch.arange(int((key_last - key_first).max()), device=spans.device)
    # the chunk ends where its keys do, so that query j of n sees all keys but the last n - 1 - j
    seen = (
        (key_last - key_first) - (last - first) + query_columns
    )  # [S, H]: the last key that it sees
    mask = key_columns <= torch.minimum(seen, key_last - key_first - 1).unsqueeze(2)
    return PaddedChunk(
        queries=torch.minimum(first + query_columns, last - 1),
        keys=torch.minimum(key_first + key_columns, key_last - 1),
        mask=mask.unsqueeze(1),
    )


def _scatter_index(padded: tuple[PaddedChunk, ...], own_rows: int) -> Tensor:
    """The first of the padded places that hold each own row."""
    held = torch.cat([chunk.queries.flatten() for chunk in padded])
    places = torch.arange(held.numel(), device=held.device)
    return torch.full((own_rows,), held.numel(), device=held.device).scatter_reduce(
        0, held, places, "amin"
    )


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: ContextRows,
    group: dist.ProcessGroup,
    attend: Attend,
) -> Tensor:
    """Causal attention of this rank's queries to the keys of their sequences on all ranks of
    `group`.

    query: (T / cp, heads, d); key: (T / cp, groups, d); value: (T / cp, groups, dv). attend: scaled
    dot-product attention of a batch, with a mask. A chunk gets only the keys up to its end. Returns
    (T / cp, heads, dv).
    """
    keys, values = gather_keys(key, value, rows, group)
    return attend_chunks(query, keys, values, rows, attend)


def gather_keys(
    key: Tensor, value: Tensor, rows: ContextRows, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """This rank's rows of keys (T / cp, groups, d) and values (T / cp, groups, dv) -> all natural
    rows, (T, ...)."""
    parts = [key.flatten(1), value.flatten(1)]
    gathered = gather_rows(torch.cat(parts, dim=1), group)[rows.natural]  # (T, groups * (d + dv))
    columns = gathered.split([part.size(1) for part in parts], dim=1)
    keys, values = (x.unflatten(1, like.shape[1:]) for x, like in zip(columns, (key, value)))
    return keys, values


def attend_chunks(
    query: Tensor, keys: Tensor, values: Tensor, rows: ContextRows, attend: Attend
) -> Tensor:
    """Attention of a rank's queries (T / cp, heads, d) to natural rows of keys (T, groups, d) and
    values (T, groups, dv)."""
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
