"""A hashed memory of n-grams: the settings of config.json, and what follows from them.

Each n-gram of two to `size` tokens is hashed by several heads into tables of its own, whose sizes
are distinct primes, since heads that share one would share their collisions (Qwen4Exp of
transformers; "Scaling Embedding Layers in Language Models", arXiv 2502.01637, has such memories).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

LARGEST = 2**63 - 1
WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step
LAYER_STEP = 10007


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """The memory of one model."""

    layers: tuple[int, ...]  # numbers of the layers that have one, from 0, ascending
    width: int  # of an entry: of all heads together
    size: int  # tokens of the longest n-grams
    heads: int  # of each length of n-grams
    smallest_table: int  # rows; the first prime is no smaller
    row_multiple: int  # rows of all heads' tables together are padded to a multiple
    seed: int
    taps: int  # of the convolution
    end: int  # the token that no n-gram crosses
    tokens: int  # number of different ones
    parts: int  # number of tensors of a file that hold a layer's tables

    @property
    def all_heads(self) -> int:
        return (self.size - 1) * self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.all_heads

    def tables(self, layer: int) -> list[int]:
        """Rows of the tables of each head of a layer: n-grams of two tokens, of three, ..."""
        first = self.layers.index(layer) * self.all_heads
        found = islice(_primes(self.smallest_table), first, first + self.all_heads)
        return list(found)

    def offsets(self, layer: int) -> list[int]:
        """The first row of each head's table among all of the layer."""
        return [0, *accumulate(self.tables(layer))][:-1]

    def rows(self, layer: int) -> int:
        """Rows of all tables of a layer, padded."""
        return -(-sum(self.tables(layer)) // self.row_multiple) * self.row_multiple

    def multipliers(self, layer: int) -> list[int]:
        """Odd factors of a token and of those before it, with which no product of a token is larger
        than 63 bits."""
        bound = max(1, LARGEST // self.tokens // 2)
        start = self.seed + LAYER_STEP * self.layers.index(layer)
        return [
            2 * (_splitmix64((start + GOLDEN * (place + 1)) & WORD) % bound) + 1
            for place in range(self.size)
        ]


def _splitmix64(state: int) -> int:
    """One number of splitmix64 (Steele, Lea and Flood 2014), a generator of 64 bits."""
    mixed = (state + GOLDEN) & WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
    return mixed ^ (mixed >> 31)


def _primes(start: int) -> Iterator[int]:
    """The primes from `start` on."""
    number = max(2, start)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1
