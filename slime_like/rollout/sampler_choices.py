"""Per-token output of an engine that training replays: routed experts (routes), and the tokens that
top-k and top-p left to sample from (token sets)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def join_routes(before: Tensor | None, now: Tensor | None, length: int) -> Tensor | None:
    """Routed experts [length, layers, topk] of a continued sample: tokens keep those of the pass
    that first computed them, under the weights of that time. before, now: routes before the
    request, and from its output."""
    if now is None:  # not requested, or no token was added
        return before if before is not None and before.size(0) == length else None
    routes = now[:length].clone()
    if before is not None:
        known_routes = routes[: before.size(0)]
        known_routes.copy_(torch.where(before >= 0, before, known_routes))
    return routes


def pad_routes(parts: Sequence[Tensor], length: int) -> Tensor:
    """Concatenate `parts` and pad with -1 to [length, layers, topk]."""
    routes = torch.cat(list(parts))[:length]
    return torch.cat([routes, routes.new_full((length - routes.size(0), *routes.shape[1:]), -1)])


def split_token_sets(token_sets: Tensor | None) -> list[Tensor]:
    """The sets in the result of `pad_token_sets`, without padding."""
    return [] if token_sets is None else [row[row >= 0] for row in token_sets]


def pad_token_sets(sets: Sequence[Tensor]) -> Tensor:
    """Pad R sets of at most K tokens with -1 to [R, K] int32."""
    return (
        pad_sequence(list(sets), batch_first=True, padding_value=-1)
        if sets
        else torch.empty((0, 0), dtype=torch.int32)
    )


def empty_token_sets(count: int) -> list[Tensor]:
    """Empty sets, for `count` tokens that the model did not generate."""
    return [torch.empty(0, dtype=torch.int32)] * count
