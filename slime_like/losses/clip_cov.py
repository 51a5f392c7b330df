"""Clip-Cov, arXiv 2505.22617: PPO without the gradient of a few random tokens of high covariance.

Candidates are active tokens that PPO does not clip, with clip_cov_lb < cov < clip_cov_ub; of them
max(1, floor(clip_cov_ratio N)) are chosen at random, and l = 0 there. Tokens that an off-policy
correction rejects cannot be chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import UNIT, arg
from slime_like.lazy import torch
from slime_like.losses.covariance import covariances, pick, random_order
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.ppo import ClipConfig, clipped_surrogate
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class ClipCovConfig(ClipConfig):
    clip_cov_ratio: float = arg(
        2e-4, "Clip-Cov: share of tokens whose gradient is cut; one at least.", legal=UNIT
    )
    clip_cov_lb: float = arg(1.0, "Clip-Cov: candidates have a covariance above this.")
    clip_cov_ub: float = arg(5.0, "Clip-Cov: candidates have a covariance below this.")


@register_policy_loss(
    "clip_cov", ClipCovConfig, needs=("advantages", "old_log_probs"), homogeneous=False
)
def clip_cov(inputs: LossInputs, config: ClipCovConfig) -> PolicyLossOutput:
    """Token losses [T]. clip_cov_frac: share of active tokens whose gradient is cut."""
    ratio = inputs.log_ratio().exp()
    surrogate = clipped_surrogate(inputs, ratio, config)
    cov = covariances(inputs)
    in_range = (cov > config.clip_cov_lb) & (cov < config.clip_cov_ub)
    candidates = inputs.kept & ~surrogate.clipped & in_range
    chosen = pick(candidates, random_order(inputs), config.clip_cov_ratio, inputs)
    metrics = {**ratio_metrics(inputs, ratio), **surrogate.metrics}
    metrics["clip_cov_frac"] = masked_mean(chosen, inputs.loss_mask)
    return PolicyLossOutput(torch.where(chosen, 0.0, surrogate.token_losses), metrics)
