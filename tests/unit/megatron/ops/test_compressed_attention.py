"""Compressed attention against a loop over queries in float64 (DeepSeek-V4's report, section 2.3), in
pieces, and on the rows of context-parallel ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.megatron.ops import compressed_attention as ops
from slime_like.megatron.ops.attention import PackedRows, packed_rows
from slime_like.megatron.ops.context_parallel import rows_of_rank

LENGTHS = (16, 4, 32, 8)  # multiples of 2 * 2, for two context-parallel ranks
HEADS, DIM, INDEX_HEADS, INDEX_DIM, RATE, TOPK, BEFORE = 3, 6, 5, 7, 3, 2, 4


def bounds() -> Tensor:
    return torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


def sequences() -> Iterator[tuple[int, int]]:
    return itertools.pairwise(bounds().tolist())


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    rows, count = sum(LENGTHS), sum(n // RATE for n in LENGTHS)
    shapes = {
        "query": (rows, HEADS, DIM),
        "keys": (rows, 1, DIM),
        "entries": (count, 1, DIM),
        "index_queries": (rows, INDEX_HEADS, INDEX_DIM),
        "weights": (rows, INDEX_HEADS),
        "index_keys": (count, INDEX_DIM),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def ours(x: dict[str, Tensor], rows: PackedRows, own: Tensor, *, sparse: bool) -> Tensor:
    """own: the natural rows that this rank has."""
    selected = None
    if sparse:
        selected = ops.select_entries(
            x["index_queries"][own], x["weights"][own], x["index_keys"], rows, RATE, TOPK
        )
    return ops.compressed_attention(
        x["query"][own],
        x["keys"],
        x["entries"],
        rows,
        attend,
        before=BEFORE,
        rate=RATE,
        selected=selected,
    )


def by_loop(x: dict[str, Tensor], *, sparse: bool) -> Tensor:
    outputs = []
    first_entry = 0
    for start, end in sequences():
        for place, t in enumerate(range(start, end)):
            entries = list(range(first_entry, first_entry + (place + 1) // RATE))
            if sparse:
                scores = {
                    e: float(
                        (
                            x["weights"][t] * (x["index_queries"][t] @ x["index_keys"][e]).relu()
                        ).sum()
                    )
                    for e in entries
                }
                entries = sorted(entries, key=lambda e: -scores[e])[:TOPK]
            near = x["keys"][max(start, t - BEFORE) : t + 1, 0]
            seen = torch.cat([near, x["entries"][entries, 0]])
            shares = (x["query"][t] @ seen.t() / math.sqrt(DIM)).softmax(-1)
            outputs.append(shares @ seen)
        first_entry += (end - start) // RATE
    return torch.stack(outputs)


def gradients(out: Tensor, x: dict[str, Tensor]) -> list[Tensor]:
    share = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return list(torch.autograd.grad((out * share).sum(), [x["query"], x["keys"], x["entries"]]))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("most", [1 << 26, 60])
def test_against_a_loop(monkeypatch: pytest.MonkeyPatch, sparse: bool, most: int) -> None:
    monkeypatch.setattr(ops, "MAX_SCORES", most)
    monkeypatch.setattr(ops, "SMALLEST_PIECE", 1 if most == 60 else 128)
    x = inputs()
    for name in ("query", "keys", "entries"):
        x[name].requires_grad_()
    rows = packed_rows(bounds())
    found = ours(x, rows, torch.arange(sum(LENGTHS)), sparse=sparse)
    expected = by_loop(x, sparse=sparse)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    for a, b in zip(gradients(found, x), gradients(expected, x), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_on_the_rows_of_two_ranks(sparse: bool) -> None:
    x = inputs()
    expected = by_loop(x, sparse=sparse)
    for rank in range(2):
        own = rows_of_rank(bounds(), 2, rank)
        found = ours(x, packed_rows(bounds(), 2, rank), own, sparse=sparse)
        assert torch.allclose(found, expected[own], rtol=0, atol=1e-13)


@pytest.mark.parametrize("overlap", [False, True])
def test_entries_are_sums_over_their_tokens(overlap: bool) -> None:
    """And with an overlap over those of the entry before, of the same sequence."""
    generator = torch.Generator().manual_seed(5)
    width = 2 * DIM if overlap else DIM
    vectors, scores = torch.randn(2, sum(LENGTHS), width, generator=generator, dtype=torch.float64)
    bias = torch.randn(RATE, width, generator=generator, dtype=torch.float64)
    tables = ops.entry_tables(packed_rows(bounds()), [RATE, 5])
    found = ops.compressed(vectors, scores, bias, tables.of_rate(RATE), overlap=overlap)
    expected = []
    for start, end in sequences():
        for first in range(start, end - RATE + 1, RATE):
            own = range(first, first + RATE)
            parts = [(vectors[t, -DIM:], scores[t, -DIM:] + bias[t - first, -DIM:]) for t in own]
            if overlap and first > start:
                before = range(first - RATE, first)
                parts += [
                    (vectors[t, :DIM], scores[t, :DIM] + bias[t - first + RATE, :DIM])
                    for t in before
                ]
            weights = torch.stack([score for _, score in parts]).softmax(0)
            expected.append((weights * torch.stack([vector for vector, _ in parts])).sum(0))
    assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-13)
    assert tables.places.tolist() == [n for length in LENGTHS for n in range(length)]


def test_turning_back() -> None:
    """A turn by a position and back is nothing; only the last dimensions are turned."""
    x = torch.randn(4, 2, 10, dtype=torch.float64)
    angles = torch.outer(torch.arange(4.0), ops.frequencies(6, 100.0, None)).double()
    out = ops.turned(x, angles.cos(), angles.sin())
    assert torch.equal(out[..., :4], x[..., :4]) and not torch.allclose(out, x)
    assert torch.allclose(ops.turned(out, angles.cos(), -angles.sin()), x, rtol=0, atol=1e-14)
