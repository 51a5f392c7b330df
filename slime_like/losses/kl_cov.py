"""KL-Cov, arXiv 2505.22617: a penalty on the tokens of the highest covariance.

    l = -A r + kl_cov_coef |d| on the max(1, floor(kl_cov_frac N)) tokens of the largest covariance
    l = -A r                   elsewhere

There is no clip. Tokens that an off-policy correction rejects cannot be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, UNIT, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.covariance import covariances, pick
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class KLCovConfig(CheckedSettings):
    kl_cov_frac: float = arg(
        0.2,
        "KL-Cov: share of tokens that get the penalty; one at least. verl's default is 2e-4.",
        legal=UNIT,
    )
    kl_cov_coef: float = arg(1.0, "KL-Cov: weight of the penalty.", legal=NON_NEGATIVE)


@register_policy_loss(
    "kl_cov", KLCovConfig, needs=("advantages", "old_log_probs"), homogeneous=False
)
def kl_cov(inputs: LossInputs, config: KLCovConfig) -> PolicyLossOutput:
    """Token losses [T]. kl_cov_sel_frac: share of active tokens that get the penalty."""
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp()
    chosen = pick(inputs.kept, covariances(inputs), config.kl_cov_frac, inputs)
    penalty = torch.where(chosen, config.kl_cov_coef * log_ratio.abs(), 0.0)
    metrics = ratio_metrics(inputs, ratio)
    metrics["kl_cov_sel_frac"] = masked_mean(chosen, inputs.loss_mask)
    return PolicyLossOutput(-inputs.required("advantages") * ratio + penalty, metrics)
