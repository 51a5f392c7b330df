"""Double-sided importance sampling relative to the rollout engine, without recomputing an old
policy: GLM-5, arXiv 2602.15763.

    l = -sg(r 1[1 - eps_clip < r < 1 + eps_clip_high]) A log_prob,      r = policy / sampler

A token outside the range gets no gradient, for either sign of its advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.lazy import torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.ppo import RangeConfig
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class RolloutISConfig(RangeConfig):
    pass


@register_policy_loss(
    "rollout_is", RolloutISConfig, needs=("advantages", "rollout_log_probs"), correction="masks"
)
def rollout_is(inputs: LossInputs, config: RolloutISConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens outside the range."""
    ratio = inputs.log_ratio("rollout_log_probs").detach().exp()
    low, high = config.bounds
    inside = (ratio > low) & (ratio < high)
    metrics = ratio_metrics(inputs, ratio, "rollout_log_probs")
    metrics["pg_clipfrac"] = masked_mean(~inside, inputs.loss_mask)
    weight = torch.where(inside, ratio, 0.0) * inputs.required("advantages")
    return PolicyLossOutput(inputs.policy_gradient(weight), metrics)
