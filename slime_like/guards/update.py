"""Guards on the first forward pass of an update, and on skipped optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.guards.finite import GuardError


def _forward_tolerance(*, same_packing: bool, half_precision: bool) -> float:
    """How far two forward passes of the same weights may differ."""
    if same_packing:
        return 1e-8
    return 1e-3 if half_precision else 1e-5


def check_old_log_probs(log_ratio_abs: float, *, same_packing: bool, half_precision: bool) -> None:
    """Check that mean |log ratio| vanishes before the first optimizer step on a rollout, where the
    current policy is still the old one.

    The limit is 1e-8 if both forward passes packed the samples identically, otherwise 1e-5 in fp32
    and 1e-3 in half precision. Raises GuardError.
    """
    limit = _forward_tolerance(same_packing=same_packing, half_precision=half_precision)
    if not log_ratio_abs <= limit:
        raise GuardError(
            "before the first optimizer step the log-probs of the update differ from the "
            f"recomputed old ones by {log_ratio_abs:.3g} on average (limit {limit:g}): the "
            "training forward pass and the log-prob pass do not compute the same model"
        )


def check_old_values(
    diff_abs: float, *, values_abs: float, same_packing: bool, half_precision: bool
) -> None:
    """Check that mean |V - V_old| vanishes before the critic's first optimizer step on a rollout.

    The limits are those of `check_old_log_probs`, relative to mean |V_old| if that is above 1.
    Raises GuardError.
    """
    limit = _forward_tolerance(same_packing=same_packing, half_precision=half_precision)
    limit *= max(1.0, values_abs)
    if not diff_abs <= limit:
        raise GuardError(
            "before the critic's first optimizer step its values differ from those of the rollout "
            f"by {diff_abs:.3g} on average (limit {limit:g}): the training forward pass and the "
            "value pass do not compute the same model"
        )


def check_initial_kl(kl: float, *, half_precision: bool) -> None:
    """Check that the KL vanishes (1e-8 in fp32, 1e-3 in half precision) in the first step of a
    fresh run if the reference model is the initial policy."""
    limit = 1e-3 if half_precision else 1e-8
    if not abs(kl) <= limit:
        raise GuardError(
            f"the KL to the reference is {kl:.3g} in the first step (limit {limit:g}), although "
            "--ref-load and --hf-checkpoint are the same folder: reference and policy were loaded "
            "differently"
        )


@dataclass(slots=True)
class SkippedStepGuard:
    """Counts optimizer steps that were skipped for a non-finite gradient; stops the run after
    `patience` consecutive ones."""

    patience: int
    in_a_row: int = 0
    total: int = 0
    owner: str = ""  # "critic's "

    def check(self, skipped: bool, grad_norm: float, loss_scale: float | None = None) -> str | None:
        """A warning, or None. Raises GuardError. loss_scale: of the next step, in fp16."""
        if not skipped:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        self.total += 1
        what = "NaN" if math.isnan(grad_norm) else "infinite"
        text = (
            f"{self.owner}optimizer step skipped: the gradient norm is {what} ({self.in_a_row} in "
            f"a row, {self.total} in total)"
        )
        if loss_scale is not None:
            text += f"; the loss scale is {loss_scale:g} now"
        if self.in_a_row >= self.patience:
            raise GuardError(text + "; see --max-consecutive-skipped-steps")
        return text
