"""GPG: group policy gradient, arXiv 2504.02546: l = -A log_prob, with no ratio and no old policy.
The paper's batch factor belongs to the advantages (--advantage-estimator gpg)."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class GPGConfig(CheckedSettings):
    """No settings."""


@register_policy_loss("gpg", GPGConfig, needs=("advantages",), bounds_ratio=False)
def gpg(inputs: LossInputs, config: GPGConfig) -> PolicyLossOutput:
    """Token losses [T]."""
    return PolicyLossOutput(inputs.policy_gradient(inputs.required("advantages")), {})
