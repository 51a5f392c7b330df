"""The policy loss of Kimi k1.5, arXiv 2501.12599, per token: l = -A log_prob + tau / 2 d^2.

The paper squares the log-ratio of the sequence; here, as in ROLL, that of each token is squared,
which makes it the loss of dro.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.losses.dro import quadratic
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class KimiConfig(CheckedSettings):
    kimi_tau: float = arg(0.1, "Kimi: weight of the squared log-ratio.", legal=POSITIVE)


@register_policy_loss(
    "kimi",
    KimiConfig,
    needs=("advantages", "old_log_probs"),
    homogeneous=False,
    aliases=("kimi15",),
)
def kimi(inputs: LossInputs, config: KimiConfig) -> PolicyLossOutput:
    """Token losses [T]."""
    return quadratic(inputs, config.kimi_tau, "kimi")
