"""Adaptive control of the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg

if TYPE_CHECKING:
    from slime_like.checkpoints.state import EntropyState


@dataclass(slots=True)
class EntropyController(CheckedSettings):
    """The coefficient of the entropy bonus; constant without a target.

    With a target the bonus acts only while entropy is too low: adaptive entropy control of
    Skywork-OR1, arXiv 2505.22312. With the mean entropy e_k over the active tokens of optimizer
    step k on all ranks, and a coefficient c_k:

        c_{k+1} = clip(c_k + delta, low, high)  where e_k < target
                  clip(c_k - delta, low, high)  where e_k > target
        bonus of step k + 1 = c_{k+1}           where e_k <= target, else 0

    The paper uses the entropy of the rollout that a step trains on; we use that of the previous
    forward pass, which every run has, so the bonus reacts one optimizer step later.
    """

    value: float = arg(0.0, "c, before the indicator.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "Target entropy per token, in nats.", legal=POSITIVE)
    delta: float = arg(1e-4, "Change per step.", legal=POSITIVE)
    low: float = arg(0.0, "Minimum of c.", legal=NON_NEGATIVE)
    high: float = arg(0.005, "Maximum of c.", legal=POSITIVE)
    active: bool = arg(True, "Whether the last entropy was at most the target.")

    @property
    def adaptive(self) -> bool:
        return self.target is not None

    @property
    def coef(self) -> float:
        """The weight of the entropy bonus in the next optimizer step."""
        return self.value if self.active else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapt to the mean entropy per token of an optimizer step's forward pass; None and
        non-finite values are ignored."""
        if self.target is None or entropy is None or not math.isfinite(entropy):
            return
        sign = (entropy < self.target) - (entropy > self.target)
        self.value = min(max(self.value + sign * self.delta, self.low), self.high)
        self.active = entropy <= self.target

    def state_dict(self) -> dict[str, object]:
        """State for checkpoints, as plain JSON."""
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: EntropyState) -> None:
        """Restore an adaptive coefficient; a fixed one comes from the command line."""
        if self.adaptive and state:
            self.value = float(state["value"])
            self.active = bool(state["active"])
