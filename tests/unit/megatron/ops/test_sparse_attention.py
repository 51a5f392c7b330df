"""Sparse attention against a loop over queries in float64 (DeepSeek-V3.2, arXiv 2512.02556, equations
1 and 2), in pieces, to pools of keys, and on the rows of context-parallel ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.megatron.indexer_replay import replayed_keys
from slime_like.megatron.ops import sparse_attention as ops
from slime_like.megatron.ops.attention import PackedRows, packed_rows
from slime_like.megatron.ops.context_parallel import rows_of_rank
from slime_like.megatron.packing import pack_all
from slime_like.types import TrainSample

LENGTHS = (16, 4, 32, 8)  # multiples of 2 * 2, for two context-parallel ranks
HEADS, DIM, VALUE, INDEX_HEADS, INDEX_DIM, TOPK = 3, 6, 4, 5, 7, 6


def bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def inputs(rows: int = sum(LENGTHS)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = {
        "query": (rows, HEADS, DIM),
        "keys": (rows, HEADS, DIM),
        "values": (rows, HEADS, VALUE),
        "index_queries": (rows, INDEX_HEADS, INDEX_DIM),
        "weights": (rows, INDEX_HEADS),
        "index_keys": (rows, INDEX_DIM),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2)


def ours(x: dict[str, Tensor], rows: PackedRows, own: Tensor) -> Tensor:
    """own: the natural rows that this rank has."""
    far = ops.far_spans(rows, TOPK)
    at = own[torch.cat([torch.arange(a, b) for a, b, _, _ in far])]
    chosen = ops.select_keys(x["index_queries"][at], x["weights"][at], x["index_keys"], far, TOPK)
    return ops.sparse_attention(x["query"][own], x["keys"], x["values"], rows, chosen, attend)


def by_loop(x: dict[str, Tensor], lengths: tuple[int, ...]) -> Tensor:
    outputs = []
    for start, end in itertools.pairwise(bounds(lengths).tolist()):
        for t in range(start, end):
            seen = range(start, t + 1)
            scores = {
                s: sum(
                    float(x["weights"][t, h])
                    * max(float(x["index_queries"][t, h] @ x["index_keys"][s]), 0.0)
                    for h in range(INDEX_HEADS)
                )
                for s in seen
            }
            chosen = sorted(sorted(seen, key=lambda s: -scores[s])[:TOPK])
            heads = []
            for h in range(HEADS):
                logits = torch.stack([x["query"][t, h] @ x["keys"][s, h] for s in chosen])
                share = (logits / math.sqrt(DIM)).softmax(0)
                heads.append(sum(p * x["values"][s, h] for p, s in zip(share, chosen, strict=True)))
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def gradients(out: Tensor, x: dict[str, Tensor]) -> list[Tensor]:
    share = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return list(
        torch.autograd.grad((out * share).sum(), [x[n] for n in ("query", "keys", "values")])
    )


@pytest.mark.parametrize("most", [1, 300, ops.MAX_SCORES])
def test_against_a_loop(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Whatever the size of the pieces."""
    monkeypatch.setattr(ops, "MAX_SCORES", most)
    x = inputs()
    for name in ("query", "keys", "values"):
        x[name].requires_grad_()
    expected, rows = by_loop(x, LENGTHS), packed_rows(bounds(LENGTHS))
    found = ours(x, rows, torch.arange(sum(LENGTHS)))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for one, other in zip(gradients(found, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_on_the_rows_of_context_parallel_ranks() -> None:
    x, cu_seqlens = inputs(), bounds(LENGTHS)
    expected = by_loop(x, LENGTHS)
    for rank in range(2):
        own = rows_of_rank(cu_seqlens, 2, rank)
        found = ours(x, packed_rows(cu_seqlens, 2, rank), own)
        torch.testing.assert_close(found, expected[own], rtol=1e-12, atol=1e-13)


def test_of_equal_scores_the_earlier() -> None:
    queries, weights = torch.ones(9, 2, 3), torch.ones(9, 2)
    chosen = ops.select_keys(queries[4:], weights[4:], torch.zeros(9, 3), [(4, 9, 0, 9)], 4)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 5


def test_pieces_are_bounded_and_hold_every_query_once() -> None:
    spans = [(0, 700, 0, 1000), (700, 1700, 1000, 2500)]
    found = list(ops.pieces(spans, heads=1 << 12))
    assert all((b - a) * (d - c) * (1 << 12) <= ops.MAX_SCORES for a, b, c, d in found)
    assert [row for a, b, _, _ in found for row in range(a, b)] == list(range(1700))
    # the last query of a piece sees as many keys as in its span
    assert all(d == (1000 - (700 - b) if b <= 700 else 2500 - (1700 - b)) for _, b, _, d in found)


POOL = 3  # keys; TOPK are those of two pools


def ours_in_pools(x: dict[str, Tensor], rows: PackedRows, own: Tensor) -> Tensor:
    """own: the natural rows that this rank has."""
    far = ops.far_rows(rows, TOPK, POOL)
    assert far.pools is not None
    spans = ops.far_spans(rows, ops.most_keys(TOPK, POOL))
    keys = ops.pooled(x["index_keys"], x["gates"], x["bias"], far.pools)
    at = own[far.queries]
    chosen = ops.select_keys(
        x["index_queries"][at], x["weights"][at], keys, spans, TOPK, POOL, rows.lengths
    )
    return ops.sparse_attention(x["query"][own], x["keys"], x["values"], rows, chosen, attend)


def pools_by_loop(x: dict[str, Tensor], lengths: tuple[int, ...]) -> Tensor:
    outputs = []
    for start, end in itertools.pairwise(bounds(lengths).tolist()):
        pools = []
        for first in range(start, end - POOL + 1, POOL):
            rows = slice(first, first + POOL)
            share = (x["gates"][rows] + x["bias"]).softmax(0)
            pools.append((first, (share * x["index_keys"][rows]).sum(0)))
        for t in range(start, end):
            complete = [(first, key) for first, key in pools if first + POOL - 1 <= t]
            scores = {
                first: float((x["weights"][t] * (x["index_queries"][t] @ key).relu()).sum())
                for first, key in complete
            }
            best = sorted(sorted(scores), key=lambda first: -scores[first])[: TOPK // POOL]
            after = start + len(complete) * POOL
            chosen = [s for first in sorted(best) for s in range(first, first + POOL)]
            chosen += range(after, t + 1)
            heads = []
            for h in range(HEADS):
                logits = x["keys"][chosen, h] @ x["query"][t, h] / math.sqrt(DIM)
                heads.append(logits.softmax(0) @ x["values"][chosen, h])
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def pooled_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(12)
    shapes = {"gates": (sum(LENGTHS), INDEX_DIM), "bias": (POOL, INDEX_DIM)}
    return inputs() | {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("most", [1, 300, ops.MAX_SCORES])
def test_pools_against_a_loop(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also of a sequence with as many keys as a query attends to at most, and of one without a
    complete pool."""
    monkeypatch.setattr(ops, "MAX_SCORES", most)
    x = pooled_inputs()
    for lengths in (LENGTHS, (8, 9, 2, 1, 40)):
        assert sum(lengths) == sum(LENGTHS)
        for name in ("query", "keys", "values"):
            x[name] = x[name].detach().requires_grad_()
        expected, rows = pools_by_loop(x, lengths), packed_rows(bounds(lengths))
        found = ours_in_pools(x, rows, torch.arange(sum(lengths)))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        for one, other in zip(gradients(found, x), gradients(expected, x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_pools_on_the_rows_of_context_parallel_ranks() -> None:
    """Whose chunks cut pools."""
    x, cu_seqlens = pooled_inputs(), bounds(LENGTHS)
    expected = pools_by_loop(x, LENGTHS)
    for rank in range(2):
        own = rows_of_rank(cu_seqlens, 2, rank)
        found = ours_in_pools(x, packed_rows(cu_seqlens, 2, rank), own)
        torch.testing.assert_close(found, expected[own], rtol=1e-12, atol=1e-13)


def test_keys_of_an_engine_replace_the_own() -> None:
    """Rows of -1 are unknown; -1 within a row fills it up."""
    own = torch.tensor([[4, 0, 2], [1, 2, 3], [5, 1, 0], [6, 2, 2]], dtype=torch.int32)
    given = torch.tensor([[0, 4, 2], [-1, -1, -1], [5, 4, 3], [2, 6, -1]], dtype=torch.int32)
    chosen, counts = ops.replay_keys(own, given)
    assert chosen.tolist() == [[0, 4, 2], [1, 2, 3], [5, 4, 3], [2, 6, 2]]
    assert counts.tolist() == [2, 8]
    assert chosen.dtype == own.dtype
    nothing, none = ops.replay_keys(own[:0], given[:0])
    assert nothing.shape == (0, 3) and none.tolist() == [0, 0]


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_records_of_samples_are_at_the_queries_of_their_rows(pool: int, cp_size: int) -> None:
    """Each row of a record says whose it is; padding, and ends of sequences that a sample lacks,
    are unknown."""
    width = TOPK + pool - 1
    lengths = (16, 4, 29, 8)
    samples = []
    for number, length in enumerate(lengths):
        rows = max(0, length - width)
        record = torch.zeros(rows, 2, width, dtype=torch.int32)
        record += 10_000 * number + (width + torch.arange(rows).int())[:, None, None]
        record += 1000 * torch.arange(2).int()[:, None]
        samples.append(
            TrainSample(torch.arange(length), 0, *(2 * [torch.ones(0)]), indexer_topk=record)
        )
    batch = pack_all(
        [samples], multiple=8, equal_lengths=False, cp_size=cp_size, cp_rank=cp_size - 1
    )[0]
    assert batch.packed is not None
    far = batch.packed.far = ops.far_rows(batch.packed, TOPK, pool)
    found = replayed_keys(batch.packed, batch.seq_ids, samples, pinned=False)
    assert found.keys() == {0, 1}
    seen = 0
    for row, (query, place) in enumerate(zip(far.queries, far.places, strict=True)):
        number = int(batch.seq_ids[query])
        is_real = number < 4 and int(place) < lengths[number]
        seen += is_real
        for slot, keys in found.items():
            right = 10_000 * number + 1000 * slot + int(place) if is_real else -1
            assert keys[row].tolist() == [right] * width
    assert seen > 5
    lacking = [*samples[:3], dataclasses.replace(samples[3], indexer_topk=None)]
    assert replayed_keys(batch.packed, batch.seq_ids, lacking, pinned=False) == {}
