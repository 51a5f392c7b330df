"""n-grams of packed rows, their hashes and the dilated convolution against loops over sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.megatron.ops.ngrams import dilated_conv, ngram_rows, table_rows
from slime_like.ngrams import NgramSettings

END = 3
LENGTHS = (9, 1, 2, 14)
SETTINGS = NgramSettings(
    layers=(0, 2),
    width=12,
    size=4,
    heads=2,
    smallest_table=20,
    row_multiple=8,
    seed=11,
    taps=3,
    end=END,
    tokens=50,
    parts=1,
)


def packed() -> tuple[Tensor, Tensor]:
    """Tokens, and where sequences start and end. A third of the tokens ends n-grams."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (sum(LENGTHS),), generator=generator)
    tokens[torch.rand(sum(LENGTHS), generator=generator) < 0.3] = END
    return tokens, torch.tensor([0, *LENGTHS]).cumsum(0).int()


def before(sequence: list[int], place: int, back: int) -> int:
    """The token `back` before, unless the sequence or what an end token ends begins in between."""
    for earlier in range(place - 1, place - 1 - back, -1):
        if earlier < 0 or sequence[earlier] == END:
            return END
    return sequence[place - back]


def by_loop(tokens: Tensor) -> list[list[int]]:
    sequences = [part.tolist() for part in tokens.split(LENGTHS)]
    return [
        [before(sequence, place, back) for back in range(SETTINGS.size)]
        for sequence in sequences
        for place in range(len(sequence))
    ]


def test_ngrams_cross_no_end() -> None:
    tokens, bounds = packed()
    rows = ngram_rows(tokens, bounds, SETTINGS.size, END)
    assert rows.tokens.tolist() == by_loop(tokens)
    assert rows.positions.tolist() == [place for n in LENGTHS for place in range(n)]
    assert (tokens[:-1] == END).any() and (rows.tokens[:, 3] != END).any()


@pytest.mark.parametrize("layer", SETTINGS.layers)
def test_hashes_by_python_integers(layer: int) -> None:
    tokens, bounds = packed()
    rows = ngram_rows(tokens, bounds, SETTINGS.size, END)
    tables = SETTINGS.tables(layer)
    factors = SETTINGS.multipliers(layer)
    offsets = SETTINGS.offsets(layer)
    found = table_rows(rows.tokens, factors, torch.tensor(tables), torch.tensor(offsets))
    expected = []
    for ngram in by_loop(tokens):
        hashes = []
        for longest in range(2, SETTINGS.size + 1):
            mixed = 0
            for token, factor in zip(ngram[:longest], factors):
                mixed ^= token * factor
            hashes += [mixed] * SETTINGS.heads
        expected.append(
            [h % size + first for h, size, first in zip(hashes, tables, offsets, strict=True)]
        )
    assert found.tolist() == expected
    assert len(set(tables)) == SETTINGS.all_heads and sum(tables) <= SETTINGS.rows(layer)


def test_no_two_layers_share_a_table_size() -> None:
    primes = [size for layer in SETTINGS.layers for size in SETTINGS.tables(layer)]
    assert primes == [23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


@pytest.mark.parametrize("dilation", [1, 4])
def test_a_convolution_for_each_sequence(dilation: int) -> None:
    """As torch's, with zeros in front; its gradients too."""
    tokens, bounds = packed()
    positions = ngram_rows(tokens, bounds, 2, END).positions
    generator = torch.Generator().manual_seed(2)
    x, weight, share = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((sum(LENGTHS), 5), (5, 3), (sum(LENGTHS), 5))
    )
    found = dilated_conv(x, weight, dilation, positions)
    parts = []
    for first, last in pairwise(bounds.tolist()):
        padded = F.pad(x[first:last].t(), (2 * dilation, 0))
        parts.append(F.conv1d(padded, weight.unsqueeze(1), dilation=dilation, groups=5).t())
    expected = torch.cat(parts)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    for own, their in zip(
        torch.autograd.grad((found * share).sum(), [x, weight]),
        torch.autograd.grad((expected * share).sum(), [x, weight]),
        strict=True,
    ):
        assert torch.allclose(own, their, rtol=0, atol=1e-13)
