"""The plain importance-sampled policy gradient, as in Tinker's `importance_sampling` (Thinking
Machines): l = -A r, without a clip."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class ImportanceSamplingConfig(CheckedSettings):
    """No settings."""


@register_policy_loss(
    "importance_sampling",
    ImportanceSamplingConfig,
    needs=("advantages", "old_log_probs"),
    bounds_ratio=False,
)
def importance_sampling(inputs: LossInputs, config: ImportanceSamplingConfig) -> PolicyLossOutput:
    """Token losses [T]. importance_ratio: mean ratio over active tokens."""
    ratio = inputs.log_ratio().exp()
    metrics = ratio_metrics(inputs, ratio)
    metrics["importance_ratio"] = masked_mean(ratio, inputs.loss_mask)
    return PolicyLossOutput(-inputs.required("advantages") * ratio, metrics)
