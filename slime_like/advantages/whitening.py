"""Advantages with mean 0 and variance 1 over all active tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, dist, torch
from slime_like.validation import require_samples

EPS = 1e-8


def whiten(
    values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """(x - mean) / sqrt(variance + 1e-8) at active tokens, 0 at the others; variance with Bessel's
    correction, from a second pass. A single token is only centred; without one all are 0.

    Args:
        values: [R] per sample.
        masks: [R] bool per sample.
        group: Data-parallel ranks (collective), each with its own samples.
    """
    require_samples(masks, values=values)
    masked = [torch.where(mask, value.double(), 0.0) for value, mask in zip(values, masks)]
    local_sum = sum(float(v.sum()) for v in masked)
    local_count = sum(int(m.sum()) for m in masks)
    sums = torch.tensor([local_sum, float(local_count)], dtype=torch.float64)
    total, count = all_reduce(sums, group).tolist()
    mean = total / max(count, 1)  # without an active token all are 0
    squares = 0.0
    for value, mask in zip(masked, masks):
        squares += float(torch.where(mask, value - mean, 0.0).square().sum())
    square = float(all_reduce(torch.tensor([squares], dtype=torch.float64), group))
    scale = (square / (count - 1) + EPS) ** -0.5 if count > 1 else 1.0
    return [torch.where(mask, (v - mean) * scale, 0.0) for v, mask in zip(masked, masks)]


def all_reduce(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum over the ranks of `group`, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
