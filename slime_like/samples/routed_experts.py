"""Routed experts that an engine reports, joined over the requests of one sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join_routed_experts(before: Tensor | None, now: Tensor | None, length: int) -> Tensor | None:
    """Routed experts [length, layers, topk] of a continued sample: tokens keep those of the pass
    that first computed them, under the weights of that time. before, now: routed experts before the
    request, and from its output."""
    if now is None:  # not requested, or no token was added
        return before if before is not None and before.size(0) == length else None
    routed_experts = now[:length].clone()
    if before is not None:
        known_experts = routed_experts[: before.size(0)]
        known_experts.copy_(torch.where(before >= 0, before, known_experts))
    return routed_experts


def pad_routed_experts(parts: Sequence[Tensor], length: int) -> Tensor:
    """Concatenate `parts` and pad with -1 to [length, layers, topk]."""
    routed_experts = torch.cat(list(parts))[:length]
    return torch.cat(
        [
            routed_experts,
            routed_experts.new_full(
                (length - routed_experts.size(0), *routed_experts.shape[1:]), -1
            ),
        ]
    )
