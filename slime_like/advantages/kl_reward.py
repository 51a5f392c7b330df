"""KL penalty in the reward, and the controllers of its coefficient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_like.advantages.whitening import all_reduce
from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, dist, torch
from slime_like.losses.kl import kl_estimate
from slime_like.validation import require_samples

if TYPE_CHECKING:
    from slime_like.checkpoints.state import KlState

ADAPTIVE_STEP = 0.2


def token_kl(
    kind: str,
    old_log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> list[Tensor]:
    """`kl_estimate` [R] float64 per sample, 0 at inactive tokens. All arguments: [R] per sample."""
    require_samples(masks, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    result = []
    for old, ref, mask in zip(old_log_probs, ref_log_probs, masks):
        estimate = kl_estimate(
            kind, torch.where(mask, old.double(), 0.0), torch.where(mask, ref.double(), 0.0)
        )
        result.append(torch.where(mask, estimate, 0.0))
    return result


def sample_kl(
    kl: Sequence[Tensor],
    local_indices: Sequence[int],
    num_samples: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Sum of each sample's KL [num_samples] float64, equal on all ranks of `group`.

    Args:
        kl: [R] per local sample.
        local_indices: Its index among all, which sequences of one episode share.
    """
    sums = torch.zeros(num_samples, dtype=torch.float64)
    for i, value in zip(local_indices, kl):
        sums[i] += value.sum()
    return all_reduce(sums, group)


@dataclass(slots=True)
class KLController(CheckedSettings):
    """The coefficient of the KL in the reward; adaptive as in Ziegler et al., arXiv 1909.08593,
    section 2.2: a KL above `target` raises it.

        value <- value (1 + clip(KL / target - 1, +-0.2) samples / horizon)

    KL is the mean over active tokens. Without a target and a horizon the coefficient is fixed.
    """

    value: float = arg(0.0, "The coefficient.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "Target KL.", legal=POSITIVE)
    horizon: float | None = arg(None, "Samples over which the coefficient moves.", legal=POSITIVE)

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt to a rollout of `num_samples` samples with this mean KL; a non-finite KL is
        ignored."""
        if self.target is None or self.horizon is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -ADAPTIVE_STEP), ADAPTIVE_STEP)
        self.value *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: KlState) -> None:
        """Restore an adaptive coefficient; a fixed one comes from the command line."""
        if self.target is not None:
            self.value = float(state["value"])
