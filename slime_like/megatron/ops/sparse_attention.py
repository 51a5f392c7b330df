"""Sparse attention to the keys selected by an indexer (DeepSeek-V3.2, arXiv 2512.02556, section
2.1), in plain torch.

A query with at most `topk` preceding keys (its own included) attends to all of them and needs no
index scores. The other queries are called far. Scores and masks of far queries are computed in
pieces, and recomputed in backward, so that memory grows linearly with the sequence length.

In GLM-5.3 the keys of each sequence are in pools of `pool` consecutive ones. A pool is scored as
one and selected with all its keys; a query also attends to its last, incomplete pool (its own key
and those before it, up to `pool` - 1). Without pools, `pool` is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import Attend
from slime_like.megatron.ops.far_rows import FarRows
from slime_like.samples.indexer_topk import most_keys

# Consecutive queries: own rows [a, b) and natural rows [c, d) of the keys that the last query
# attends to; each earlier query attends to one key less. As in `ContextRows`.
Span = tuple[int, int, int, int]
MAX_SCORES = 1 << 26  # (query, key, head) scores of a piece


def spans_of(rows: PackedRows) -> tuple[Span, ...]:
    """Spans of all queries of this rank, in row order."""
    if rows.context is not None:
        return rows.context.spans
    bounds = itertools.accumulate(rows.lengths, initial=0)
    return tuple((start, end, start, end) for start, end in itertools.pairwise(bounds))


def near_and_far(span: Span, topk: int) -> tuple[Span, Span]:
    """Split a span into the queries that attend to at most `topk` keys and the far ones; either may
    be empty."""
    first, last, key_first, key_last = span
    before = (key_last - key_first) - (last - first)  # keys before that of the first query
    near = min(max(topk - before, 0), last - first)
    middle = first + near
    return (first, middle, key_first, key_first + before + near), (middle, last, *span[2:])


def far_spans(rows: PackedRows, topk: int) -> list[Span]:
    """topk: as of `near_and_far`."""
    spans = (near_and_far(span, topk)[1] for span in spans_of(rows))
    return [span for span in spans if span[0] < span[1]]


def far_rows(rows: PackedRows, topk: int, pool: int = 1) -> FarRows:
    """On the host."""
    spans = far_spans(rows, most_keys(topk, pool))
    queries = [torch.arange(a, b) for a, b, _, _ in spans]
    places = [torch.arange(d - c - (b - a), d - c) for a, b, c, d in spans]
    nothing = torch.zeros(0, dtype=torch.int64)
    return FarRows(
        torch.cat([nothing, *queries]),
        torch.cat([nothing, *places]),
        torch.cat([torch.arange(n) for n in rows.lengths]),
        _pools(rows.lengths, pool) if pool > 1 else None,
    )


def _pools(lengths: Sequence[int], pool: int) -> Tensor:
    """See `FarRows`."""
    complete = [
        torch.arange(start, start + n - n % pool)
        for start, n in zip(_starts(lengths), lengths, strict=False)
    ]
    return torch.cat(complete).view(-1, pool)


def _starts(lengths: Iterable[int]) -> Iterator[int]:
    return itertools.accumulate(lengths, initial=0)


def pieces(spans: Iterable[Span], heads: int) -> Iterator[Span]:
    """Split spans into pieces of at most MAX_SCORES scores, or of one query."""
    for first, last, key_first, key_last in spans:
        size = max(1, MAX_SCORES // (heads * (key_last - key_first)))
        for start in range(first, last, size):
            end = min(start + size, last)
            yield start, end, key_first, key_last - (last - end)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Index scores I = sum_h w_h relu(q_h k), equation 1 of the paper; the weights include the
    scale.

    Args:
        queries: [F, heads, d].
        weights: [F, heads], float32 or wider.
        keys: [K, d].

    Returns:
        [F, K], in the dtype of the weights.
    """
    dtype = weights.dtype
    products = torch.matmul(queries.to(dtype), keys.to(dtype).t()).relu_()
    return torch.matmul(weights.unsqueeze(1), products).squeeze(1)


def pooled(keys: Tensor, scores: Tensor, bias: Tensor, pools: Tensor) -> Tensor:
    """The keys of pools, [P, d]: sums of their keys, weighted channel by channel by a softmax.

    Args:
        keys: [T, d], natural rows.
        scores: [T, d], of the softmax.
        bias: [n, d], added to the scores by place within a pool.
        pools: See `FarRows`.
    """
    dtype = torch.promote_types(keys.dtype, torch.float32)
    weights = (scores[pools].to(dtype) + bias.to(dtype)).softmax(1).to(keys.dtype)
    return (weights * keys[pools]).sum(1)


def select_keys(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    far: Iterable[Span],
    topk: int,
    pool: int = 1,
    lengths: Sequence[int] = (),
) -> Tensor:
    """Select the `topk` / `pool` pools with the largest index scores for each far query; ties go to
    the earlier pool.

    Args:
        queries, weights: As for `index_scores`, for the far queries in row order.
        keys: [P, d], of the pools in natural order; without pools [T, d], natural rows.
        lengths: Of all sequences, with pools.

    Returns:
        [F, topk + pool - 1] int32, relative to the first key of the query's sequence: the keys of
        the selected pools, and those of the incomplete pool, some of them twice if these are fewer.
    """
    selected = [queries.new_empty(0, most_keys(topk, pool), dtype=torch.int32)]
    counts = (n // pool for n in lengths)
    first_pools = dict(zip(_starts(lengths), _starts(counts), strict=True))  # by first key
    within = torch.arange(pool, device=keys.device)
    at = 0
    for first, last, key_first, key_last in pieces(far, queries.size(1)):
        count = last - first
        num_keys = key_last - key_first
        piece = slice(at, at + count)
        start = key_first if pool == 1 else first_pools[key_first]
        pool_keys = keys[start : start + num_keys // pool]
        scores = index_scores(queries[piece], weights[piece], pool_keys)
        seen = torch.arange(num_keys - count + 1, num_keys + 1, device=keys.device).unsqueeze(1)
        later = torch.arange(scores.size(1), device=keys.device) >= seen // pool
        ranked = scores.masked_fill_(later, -torch.inf).sort(dim=1, descending=True, stable=True)
        chosen = ranked.indices[:, : topk // pool]
        if pool > 1:
            chosen = (chosen.unsqueeze(2) * pool + within).flatten(1)
            last_pool = seen // pool * pool + within[:-1]
            chosen = torch.cat([chosen, last_pool.where(last_pool < seen, chosen[:, :1])], 1)
        selected.append(chosen.int())
        at += count
    return torch.cat(selected)


def replay_keys(selected: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the selection by an engine's.

    Args:
        selected: The result of `select_keys`, [F, n] int32.
        given: The same of the engine, where -1 fills up a row; a row of -1 is unknown, and keeps
            the own selection.

    Returns:
        [F, n] int32, and [2] float64: how many of the given keys `selected` lacks, and how many are
        given.
    """
    first = given[:, :1]
    present = given >= 0
    ranked = selected.sort(dim=1).values
    places = torch.searchsorted(ranked, given).clamp_(max=given.size(1) - 1)
    lacking = present & (ranked.gather(1, places) != given)
    chosen = given.where(present, first).where(first >= 0, selected)
    return chosen, torch.stack([lacking.sum(), present.sum()]).double()


def attend_selected(
    query: Tensor, keys: Tensor, values: Tensor, selected: Tensor, attend: Attend
) -> Tensor:
    """Attention of queries [F, heads, d] to the selected ones of keys [K, heads, d] and values [K,
    heads, dv]. Returns [F, heads, dv]."""
    mask = torch.zeros(selected.size(0), keys.size(0), dtype=torch.bool, device=selected.device)
    mask.scatter_(1, selected.long(), True)
    return attend(query[None], keys[None], values[None], mask)[0]


def sparse_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    selected: Tensor,
    attend: Attend,
) -> Tensor:
    """Attention of a rank's queries to the selected keys of their sequences.

    Args:
        query: [T / cp, heads, d], this rank's rows.
        keys, values: [T, heads, d] and [T, heads, dv], natural rows.
        selected: [F, n], the result of `select_keys`, where n is `most_keys`.
        attend: Scaled dot-product attention of a batch, with a mask.

    Returns:
        [T / cp, heads, dv].
    """
    outputs = []
    at = 0
    topk = selected.size(1)
    for span in spans_of(rows):
        (first, last, key_first, key_last), far = near_and_far(span, topk)
        if first < last:
            span_keys = keys[key_first:key_last]
            span_values = values[key_first:key_last]
            outputs.append(_attend_all(query[first:last], span_keys, span_values, attend))
        for first, last, key_first, key_last in pieces([far], query.size(1)):
            inputs = (query[first:last], keys[key_first:key_last], values[key_first:key_last])
            piece_selected = selected[at : at + last - first]
            outputs.append(
                checkpoint(attend_selected, *inputs, piece_selected, attend, use_reentrant=False)
            )
            at += last - first
    return torch.cat(outputs)


def _attend_all(query: Tensor, keys: Tensor, values: Tensor, attend: Attend) -> Tensor:
    mask = None
    if query.size(0) != keys.size(0):
        mask = causal_lower_right(query.size(0), keys.size(0))
    return attend(query[None], keys[None], values[None], mask)[0]
