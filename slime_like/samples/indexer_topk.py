"""Keys that an engine's indexers selected for each query, joined over the requests of one sample.

A query attends to at most K keys, so those before position K have no choice. The record of n tokens
therefore has n - K rows, from the query at position K on, and none for a short sequence:
[max(0, n - K), indexers, K] int32. Keys are positions within the sequence; -1 fills up a row of a
query with fewer of them, and a row of -1 is unknown. DeepSeek-V4's indexers select compressed
entries of several tokens in place of keys, by their number within the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.samples.routed_experts import join_routed_experts, pad_routed_experts


def most_keys(topk: int, pool: int) -> int:
    """The number of keys that a query attends to at most: those of the selected pools of `pool`
    keys, and of an incomplete one. A query with so many preceding keys or fewer has no other
    pools."""
    return topk + pool - 1


def rows_with_choice(length: int, width: int) -> int:
    """Rows of the record of `length` tokens, of which a query attends to at most `width`."""
    return max(0, length - width)


def join_indexer_topk(before: Tensor | None, now: Tensor | None, length: int) -> Tensor | None:
    """As `join_routed_experts`, for a sample of `length` tokens."""
    known = before if now is None else now
    if known is None:
        return None
    return join_routed_experts(before, now, rows_with_choice(length, known.size(2)))


def pad_indexer_topk(parts: Sequence[Tensor], length: int) -> Tensor:
    """Concatenate `parts`, and pad with -1 to the record of `length` tokens."""
    return pad_routed_experts(parts, rows_with_choice(length, parts[0].size(2)))


def unknown_keys(length: int, indexers: int, width: int) -> Tensor:
    """The record of tokens of which nothing is known."""
    return torch.full((rows_with_choice(length, width), indexers, width), -1, dtype=torch.int32)
