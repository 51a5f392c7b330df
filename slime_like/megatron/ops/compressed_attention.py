"""Attention to a window of tokens and to compressed entries (DeepSeek-V4's report, section 2.3), in
plain torch.

Keys are values: one vector for each token, and one for each `rate` consecutive tokens of a
sequence, an entry, which a token sees once its tokens are all there. An entry is a sum of vectors
of its tokens, weighted channel by channel by a softmax. With an overlap (CSA) each token has
vectors for the entry of its own tokens, and others for the entry after that.

A query attends to its window and to all entries that it sees (HCA), or to those of them that an
indexer selects (CSA). Queries are computed in pieces, and again in backward, so that memory grows
linearly with the length of a sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime_like.megatron.ops.attention import PackedRows
from slime_like.megatron.ops.context_parallel import Attend
from slime_like.megatron.ops.entries import EntryRows, EntryTables
from slime_like.megatron.ops.sparse_attention import MAX_SCORES, index_scores, pooled, spans_of
from slime_like.yarn import Yarn

SMALLEST_PIECE = 128  # queries, where the scores of that many fit


def frequencies(width: int, base: float, yarn: Yarn | None) -> Tensor:
    """[width / 2] float32: how far a position turns each pair of `width` rotary dimensions."""
    slowness = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / slowness
    if yarn is None:
        return plain

    def dimension(turns: float) -> float:
        """That turns so often within the original length."""
        length = yarn.original_length / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high: float = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    high = high + 0.001 if low == high else high
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    return 1.0 / (yarn.factor * slowness) * (1.0 - kept) + plain * kept


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the pairs of the last dimensions of [n, heads, d]. cosines, sines: [n, pairs]."""
    pairs = cosines.size(-1)
    rest, rotary = x.split([x.size(-1) - 2 * pairs, 2 * pairs], -1)
    wide = rotary.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.unflatten(-1, (pairs, 2)).unbind(-1)
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    out = torch.stack([first * cosines - second * sines, second * cosines + first * sines], -1)
    return torch.cat([rest, out.flatten(-2).to(x.dtype)], -1)


def entry_tables(rows: PackedRows, rates: Sequence[int]) -> EntryTables:
    """On the host. rates: of all layers."""
    places = [torch.arange(d - c - (b - a), d - c) for a, b, c, d in spans_of(rows)]
    return EntryTables(torch.cat(places), tuple(_entries(rows.lengths, rate) for rate in rates))


def _entries(lengths: Sequence[int], rate: int) -> EntryRows:
    starts = itertools.accumulate(lengths, initial=0)
    tokens = [torch.arange(s, s + n - n % rate) for s, n in zip(starts, lengths, strict=False)]
    numbers = [torch.arange(n // rate) for n in lengths]
    number = torch.cat(numbers)
    return EntryRows(rate, torch.cat(tokens).view(-1, rate), number * rate, number > 0)


def compressed(
    vectors: Tensor, scores: Tensor, bias: Tensor, entries: EntryRows, *, overlap: bool
) -> Tensor:
    """The sums of the tokens of each entry, [P, d].

    Args:
        vectors, scores: [T, d] in natural rows; with `overlap` [T, 2 d], for the entry after that
            of a token first.
        bias: [rate, d] or [rate, 2 d], added to the scores by place within an entry.
    """
    if not overlap:
        return pooled(vectors, scores, bias, entries.tokens)
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    later, own = vectors[entries.tokens].chunk(2, -1)
    of_later, of_own = (scores[entries.tokens].to(dtype) + bias.to(dtype)).chunk(2, -1)
    before = (torch.arange(later.size(0), device=vectors.device) - 1).clamp(min=0)
    is_first = ~entries.follows.view(-1, 1, 1)
    of_earlier = of_later[before].masked_fill(is_first, -torch.inf)
    weights = torch.cat([of_earlier, of_own], 1).softmax(1).to(vectors.dtype)
    return (weights * torch.cat([later[before], own], 1)).sum(1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of one sequence."""

    rows: slice  # of this rank's rows
    keys: slice  # natural rows of the keys that they attend to in a window
    entries: slice  # those that the last of them sees
    place: int  # position of the first query within its sequence


def pieces(rows: PackedRows, before: int, rate: int, heads: int) -> Iterator[Piece]:
    """The queries of this rank, in order.

    Args:
        before: How many tokens before its own a query attends to.
        rate: Tokens of an entry; 0: there are none.
    """
    firsts = itertools.accumulate((n // rate if rate else 0 for n in rows.lengths), initial=0)
    starts = itertools.accumulate(rows.lengths, initial=0)
    first_entries = dict(zip(starts, firsts, strict=True))  # by first key
    for first, last, key_first, key_last in spans_of(rows):
        offset = (key_last - key_first) - last  # from a query's row to its place
        most = before + SMALLEST_PIECE + ((key_last - key_first) // rate if rate else 0)
        size = max(1, min(max(before + 1, SMALLEST_PIECE), MAX_SCORES // (heads * most)))
        for start in range(first, last, size):
            end = min(start + size, last)
            place = start + offset
            entry = first_entries[key_first]
            seen = (end + offset) // rate if rate else 0
            yield Piece(
                slice(start, end),
                slice(key_first + max(place - before, 0), key_first + end + offset),
                slice(entry, entry + seen),
                place,
            )


def _seen(piece: Piece, rate: int, device: torch.device) -> Tensor:
    """[n, 1]: how many entries each query of a piece sees."""
    count = piece.rows.stop - piece.rows.start
    last = torch.arange(piece.place + 1, piece.place + count + 1, device=device)
    return (last // rate).unsqueeze(1)


def select_entries(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    rows: PackedRows,
    rate: int,
    topk: int,
) -> Tensor:
    """The `topk` entries with the largest index scores that each query sees; ties go to the earlier
    entry.

    Args:
        queries: [T / cp, heads, d], this rank's rows.
        weights: [T / cp, heads], see `index_scores`.
        keys: [P, d], of the entries.

    Returns:
        [T / cp, topk] int32, relative to the first entry of the query's sequence; -1 where a query
        sees fewer.
    """
    selected = queries.new_full((queries.size(0), topk), -1, dtype=torch.int32)
    for piece in pieces(rows, 0, rate, queries.size(1)):
        scores = index_scores(queries[piece.rows], weights[piece.rows], keys[piece.entries])
        seen = _seen(piece, rate, keys.device)
        later = torch.arange(scores.size(1), device=keys.device) >= seen
        ranked = scores.masked_fill_(later, -torch.inf).sort(dim=1, descending=True, stable=True)
        chosen = ranked.indices[:, :topk]
        selected[piece.rows, : chosen.size(1)] = chosen.where(chosen < seen, -1).int()
    return selected


def _attend_piece(
    query: Tensor,
    keys: Tensor,
    entries: Tensor,
    selected: Tensor | None,
    piece: Piece,
    before: int,
    rate: int,
    attend: Attend,
) -> Tensor:
    device = query.device
    count, number = query.size(0), keys.size(0)
    own = torch.arange(number - count, number, device=device).unsqueeze(1)
    key = torch.arange(number, device=device)
    mask = (key <= own) & (key >= own - before)
    if entries.size(0):
        if selected is None:
            visible = torch.arange(entries.size(0), device=device) < _seen(piece, rate, device)
        else:  # what is not selected goes to a column that is cut off
            columns = selected.long().where(selected >= 0, entries.size(0))
            visible = torch.zeros(count, entries.size(0) + 1, dtype=torch.bool, device=device)
            visible = visible.scatter(1, columns, True)[:, :-1]
        mask = torch.cat([mask, visible], 1)
        keys = torch.cat([keys, entries])
    return attend(query[None], keys[None], keys[None], mask)[0]


def compressed_attention(
    query: Tensor,
    keys: Tensor,
    entries: Tensor,
    rows: PackedRows,
    attend: Attend,
    *,
    before: int,
    rate: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attention of a rank's queries to their windows and to entries.

    Args:
        query: [T / cp, heads, d], this rank's rows.
        keys: [T, 1, d], natural rows.
        entries: [P, 1, d]; none where `rate` is 0.
        attend: Scaled dot-product attention of a batch, with a mask.
        before, rate: See `pieces`.
        selected: The result of `select_entries`; None: a query attends to all entries it sees.

    Returns:
        [T / cp, heads, d].
    """
    outputs = []
    for piece in pieces(rows, before, rate, query.size(1)):
        chosen = None if selected is None else selected[piece.rows]
        inputs = (query[piece.rows], keys[piece.keys], entries[piece.entries], chosen)
        outputs.append(
            checkpoint(_attend_piece, *inputs, piece, before, rate, attend, use_reentrant=False)
        )
    return torch.cat(outputs)
