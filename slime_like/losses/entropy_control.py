"""An entropy bonus that acts only while entropy is too low: Skywork-OR1, arXiv 2505.22312, its
adaptive entropy control.

With the entropy e_k by token of optimizer step k, averaged over its active tokens on all ranks, and
a coefficient c_k:

    c_{k+1} = clip(c_k + delta, low, high)  where e_k < target
              clip(c_k - delta, low, high)  where e_k > target
    bonus of step k + 1 = c_{k+1}           where e_k <= target, else 0

The paper reads the entropy of the rollout that a step trains on; here it is that of the forward
pass before, which every run has, so the bonus answers one optimizer step later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg


@dataclass(slots=True)
class EntropyController(CheckedSettings):
    """The coefficient of the entropy bonus. target None: it is `value` for good."""

    value: float = arg(0.0, "c, before the indicator.", legal=NON_NEGATIVE)
    target: float | None = arg(None, "Entropy by token, in nats, that is kept.", legal=POSITIVE)
    delta: float = arg(1e-4, "Change in a step.", legal=POSITIVE)
    low: float = arg(0.0, "Least c.", legal=NON_NEGATIVE)
    high: float = arg(0.005, "Largest c.", legal=POSITIVE)
    active: bool = arg(
        True, "Whether the last entropy was at most the target; before the first step it counts so."
    )

    @property
    def adaptive(self) -> bool:
        return self.target is not None

    @property
    def coef(self) -> float:
        """The weight of the entropy bonus in the next optimizer step."""
        return self.value if self.active else 0.0

    def update(self, entropy: float | None) -> None:
        """After the forward pass of an optimizer step with this mean entropy by token; None or not
        finite changes nothing."""
        if self.target is None or entropy is None or not math.isfinite(entropy):
            return
        sign = (entropy < self.target) - (entropy > self.target)
        self.value = min(max(self.value + sign * self.delta, self.low), self.high)
        self.active = entropy <= self.target

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain JSON."""
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A fixed coefficient is what the command line says; so is the start of a run without a
        state."""
        if self.adaptive and state:
            self.value, self.active = float(state["value"]), bool(state["active"])
