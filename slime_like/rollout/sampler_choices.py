"""What an engine reports for each token besides its log-prob, and training replays: the experts
that it
went to (routes), and the tokens that it was sampled from (token sets)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def joined_routes(before: Tensor | None, now: Tensor | None, length: int) -> Tensor | None:
    """[length, layers, topk] of a sample that grew: where its tokens went when they were first
    computed, under the weights of then."""
    if now is None:  # not asked for, or nothing was added
        return before if before is not None and before.size(0) == length else None
    routes = now[:length].clone()
    if before is not None:
        known = routes[: before.size(0)]
        known.copy_(torch.where(before >= 0, before, known))
    return routes


def full_routes(parts: Sequence[Tensor], length: int) -> Tensor:
    """Concatenate `parts` and pad with -1 to [length, layers, topk]."""
    known = torch.cat(list(parts))[:length]
    return torch.cat([known, known.new_full((length - known.size(0), *known.shape[1:]), -1)])


def sets_of(token_sets: Tensor | None) -> list[Tensor]:
    """The sets of `pad_token_sets`, without what fills them up."""
    return [] if token_sets is None else [row[row >= 0] for row in token_sets]


def pad_token_sets(sets: Sequence[Tensor]) -> Tensor:
    """[R, K] int32 of R sets of at most K tokens, filled up with -1."""
    return (
        pad_sequence(list(sets), batch_first=True, padding_value=-1)
        if sets
        else torch.empty((0, 0), dtype=torch.int32)
    )


def no_sets(count: int) -> list[Tensor]:
    """Of tokens that the model did not write."""
    return [torch.empty(0, dtype=torch.int32)] * count
