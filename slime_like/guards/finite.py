"""Guard against NaN and infinite numbers in per-token tensors and losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.distributed.collectives import gather
from slime_like.errors import RunError

_LOSSES = (
    "loss",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "positive_nll",
    "observation_loss",
    "value_loss",
    "kl",
    "entropy",
)


class GuardError(RunError):
    """A numeric guard failed."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first NaN or infinite number on a rank."""

    what: str
    sample: str  # name of the sample
    token: int  # index within its response
    value: float
    rank: int

    def __str__(self) -> str:
        return (
            f"{self.what} of sample {self.sample} is {self.value:g} at token {self.token} of its "
            f"response (rank {self.rank})"
        )


def first_non_finite(
    columns: Mapping[str, Sequence[Tensor | None] | None],
    masks: Sequence[Tensor],
    samples: Sequence[str],
) -> NonFinite | None:
    """Find the first NaN or infinite number at an active token of this rank's samples.

    Args:
        columns: Description of the number -> [R] per sample; None for absent tensors.
        masks: [R] bool per sample, active tokens.
        samples: Name of each sample.

    Returns:
        None if all are finite.
    """
    for what, values in columns.items():
        rows = [row for row in zip(samples, masks, values or ()) if row[2] is not None]
        if not rows:
            continue
        # one test of all samples; the samples are tested one by one only if it fails
        all_masks = torch.cat([mask for _, mask, _ in rows])
        all_values = torch.cat([value for _, _, value in rows if value is not None])
        if bool((torch.isfinite(all_values) | ~all_masks).all()):
            continue
        for sample, mask, value in rows:
            assert value is not None
            broken = mask & ~torch.isfinite(value)
            if broken.any():
                token = int(broken.nonzero()[0])
                rank = dist.get_rank() if dist.is_initialized() else 0
                return NonFinite(what, sample, token, float(value[token]), rank)
    return None


def check_finite(
    columns: Mapping[str, Sequence[Tensor | None] | None],
    masks: Sequence[Tensor],
    samples: Sequence[str],
    *,
    when: str,
) -> None:
    """Refuse to train on NaN or infinity. Collective: all ranks raise the same error.

    Args:
        columns, masks, samples: See `first_non_finite`.
        when: Stage of training for the message, e.g. "before the first optimizer step".

    Raises:
        GuardError: Names the first non-finite number of the lowest rank that has one.
    """
    by_rank = gather(first_non_finite(columns, masks, samples))
    non_finite = [number for number in by_rank if number is not None]
    if non_finite:
        others = f"; {len(non_finite)} ranks have such numbers" if len(non_finite) > 1 else ""
        raise GuardError(f"{when}: the {non_finite[0]}{others}")


def non_finite_losses(metrics: Mapping[str, float]) -> list[str]:
    """Losses and entropies of a step that are NaN or infinite, as "name value". metrics: equal on
    all ranks."""
    return [
        f"{name} {metrics[name]:g}"
        for name in _LOSSES
        if name in metrics and not math.isfinite(metrics[name])
    ]
