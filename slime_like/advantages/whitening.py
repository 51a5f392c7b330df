"""Advantages with mean 0 and variance 1 over all active tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.inputs import require_samples

EPS = 1e-8


def whiten(
    values: Sequence[Tensor], masks: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """(x - mean) / sqrt(variance + 1e-8) at active tokens, 0 at the others; variance with Bessel's
    correction, from a second pass.

    values: [R] by sample, masks: [R] bool. group: data-parallel ranks, each with its own samples,
    each of which calls this, even without tokens. A single token is centred only. Raises
    ValueError, on all ranks alike, when no rank has an active token.
    """
    require_samples(masks, values=values)
    mine = [torch.where(mask, value.double(), 0.0) for value, mask in zip(values, masks)]
    first = torch.tensor(
        [sum(float(v.sum()) for v in mine), float(sum(int(m.sum()) for m in masks))],
        dtype=torch.float64,
    )
    total, count = sum_over(first, group).tolist()
    if count == 0:
        raise ValueError(
            "--normalize-advantages: no token of this rollout is trained on, so there is nothing to normalise"
        )
    mean = total / count
    squares = sum(
        float(torch.where(mask, v - mean, 0.0).square().sum()) for v, mask in zip(mine, masks)
    )
    square = float(sum_over(torch.tensor([squares], dtype=torch.float64), group))
    scale = (square / (count - 1) + EPS) ** -0.5 if count > 1 else 1.0
    return [torch.where(mask, (v - mean) * scale, 0.0) for v, mask in zip(mine, masks)]


def sum_over(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """In place, over the ranks of `group`."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, group=group)
    return values
