"""GMPO: geometric-mean policy optimisation, arXiv 2507.20673, with its token-level clip in log
space.

    e = min(d, eps_high) where A > 0, max(d, -eps_low) where A < 0, 0 where A = 0
    rho = exp(mean of e over the sequence),      l = -A rho

so a sequence contributes -rho sum(w A), and each unclipped token gets the gradient -rho sum(w A) /
n. The paper's objective has one advantage per sequence; a token-level A is another objective.

Off-policy correction: rejected tokens leave both the mean and the sum, and rho is multiplied by the
geometric mean of the importance weights of the kept tokens, which equals a sequence-level weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class GMPOConfig(CheckedSettings):
    gmpo_eps_low: float = arg(
        0.4,
        "GMPO: the log-ratio of a negative advantage is clipped below at minus this.",
        legal=NON_NEGATIVE,
    )
    gmpo_eps_high: float = arg(
        0.4,
        "GMPO: the log-ratio of a positive advantage is clipped above at this.",
        legal=NON_NEGATIVE,
    )


@register_policy_loss(
    "gmpo",
    GMPOConfig,
    needs=("advantages", "old_log_probs"),
    correction="internal",
    required_reductions=("sequence_mean", "rollout_mean"),
    aliases=("geo_mean",),
)
def gmpo(inputs: LossInputs, config: GMPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens where the clip acts; pg_clipfrac_high
    and _low: of either side."""
    advantages = inputs.required("advantages")
    log_ratio = inputs.log_ratio()
    kept = inputs.kept
    positive = advantages > 0
    negative = advantages < 0
    clipped = torch.where(
        positive,
        log_ratio.clamp(max=config.gmpo_eps_high),
        log_ratio.clamp(min=-config.gmpo_eps_low),
    )
    exponent = torch.where(kept & (positive | negative), clipped, 0.0)
    if inputs.importance_weights is not None:
        exponent = exponent + torch.where(kept, inputs.required("importance_weights"), 1.0).log()
    count = inputs.seq_sum(kept.to(exponent.dtype)).clamp(min=1)
    ratio = (inputs.seq_sum(exponent) / count).exp()
    metrics = ratio_metrics(inputs, log_ratio.detach().exp())
    high = positive & (log_ratio > config.gmpo_eps_high)
    low = negative & (log_ratio < -config.gmpo_eps_low)
    metrics["pg_clipfrac"] = masked_mean(high | low, inputs.loss_mask)
    metrics["pg_clipfrac_high"] = masked_mean(high, inputs.loss_mask)
    metrics["pg_clipfrac_low"] = masked_mean(low, inputs.loss_mask)
    return PolicyLossOutput(torch.where(kept, -advantages * ratio, 0.0), metrics)
