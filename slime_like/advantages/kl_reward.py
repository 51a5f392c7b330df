"""KL penalty in the reward, and the controllers of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.inputs import require_samples
from slime_like.losses.kl import kl_estimate

if TYPE_CHECKING:
    from slime_like.checkpoints.state import KlState


ADAPTIVE_STEP = 0.2


def token_kl(
    kind: str,
    old_log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> list[Tensor]:
    """The estimate of `losses/kl.py` [R] float64 by sample, 0 at inactive tokens. All arguments:
    [R] by sample."""
    require_samples(masks, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    result = []
    for old, ref, mask in zip(old_log_probs, ref_log_probs, masks):
        estimate = kl_estimate(
            kind, torch.where(mask, old.double(), 0.0), torch.where(mask, ref.double(), 0.0)
        )
        result.append(torch.where(mask, estimate, 0.0))
    return result


def sample_kl(
    kl: Sequence[Tensor], mine: Sequence[int], num_samples: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum of each sample's KL [num_samples] float64, equal on all ranks. kl: [R] of this rank's
    samples, which are `mine` among all, of which several may be one episode; group: data-parallel ranks, which share the samples."""
    sums = torch.zeros(num_samples, dtype=torch.float64)
    for i, value in zip(mine, kl):
        sums[i] += value.sum()
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums


@dataclass(slots=True)
class KLController(CheckedSettings):
    """The coefficient of the KL in the reward. adaptive: Ziegler et al., arXiv 1909.08593, section
    2.2; a KL above `target` raises it.

        value <- value (1 + clip(KL / target - 1, +-0.2) samples / horizon)

    KL: mean over active tokens. target, horizon: None for a fixed coefficient.
    """

    value: float = arg(0.0, "The coefficient.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "KL that is aimed at.", legal=POSITIVE)
    horizon: float | None = arg(None, "Samples over which the coefficient moves.", legal=POSITIVE)

    def update(self, kl: float, num_samples: int) -> None:
        """After a rollout of `num_samples` samples with this mean KL. A KL that is not finite
        changes nothing."""
        if self.target is None or self.horizon is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -ADAPTIVE_STEP), ADAPTIVE_STEP)
        self.value *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: KlState) -> None:
        """A fixed coefficient is what the command line says."""
        if self.target is not None:
            self.value = float(state["value"])
