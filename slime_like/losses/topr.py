"""TOPR: tapered off-policy REINFORCE, arXiv 2503.14286, with the ratio of each token (as in ROLL;
the paper's is the trajectory's).

    l = -w_pos A log_prob                           where the sample's raw reward is above 0
    l = -w_neg sg(clip(r, 0, 1)) A log_prob         elsewhere

Good samples keep their full weight however unlikely they have become; bad ones lose it as the
policy stops producing them.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import (
    LossInputs,
    PolicyLossOutput,
    ratio_metrics,
    sequence_mean_metric,
)
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class TOPRConfig(CheckedSettings):
    topr_positive_weight: float = arg(
        1.0, "TOPR: weight of samples with a reward above 0.", legal=NON_NEGATIVE
    )
    topr_negative_weight: float = arg(1.0, "TOPR: weight of the other samples.", legal=NON_NEGATIVE)


@register_policy_loss("topr", TOPRConfig, needs=("advantages", "old_log_probs", "rewards"))
def topr(inputs: LossInputs, config: TOPRConfig) -> PolicyLossOutput:
    """Token losses [T]. topr/positive_frac: share of sequences with a reward above 0;
    topr/negative_ratio_above_one: share of the others' active tokens whose ratio is clipped."""
    positive = inputs.required("rewards") > 0
    ratio = inputs.log_ratio().detach().exp()
    weight = torch.where(
        positive, config.topr_positive_weight, config.topr_negative_weight * ratio.clamp(0, 1)
    )
    metrics = ratio_metrics(inputs, ratio)
    metrics["topr/positive_frac"] = sequence_mean_metric(inputs, positive.float())
    metrics["topr/negative_ratio_above_one"] = masked_mean(ratio > 1, inputs.loss_mask & ~positive)
    return PolicyLossOutput(inputs.policy_gradient(weight * inputs.required("advantages")), metrics)
