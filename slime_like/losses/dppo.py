"""DPPO: a trust region on the divergence of the sampled token's probability, arXiv 2602.04879
(binary approximations).

With mu the rollout log-probs, or the old ones if there are none, p = exp(log_prob), q = exp(mu):

    l = -A r keep,      r = p / q; keep is constant, and 0 where the update would leave the region:
    binary_tv   A > 0 and p - q > delta_high,   or A < 0 and q - p > delta_low
    binary_kl   A > 0, p > q and KL > delta_high,   or A < 0, p < q and KL > delta_low,
                KL = q (mu - log_prob) + (1 - q) log((1 - q) / (1 - p))
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean

DEFAULT_DELTA = {"binary_tv": 0.2, "binary_kl": 0.05}
MIN_COMPLEMENT = 1e-8  # lower bound of 1 - p and 1 - q


@dataclass(frozen=True, slots=True)
class DPPOConfig(CheckedSettings):
    dppo_type: str = arg(
        "binary_tv", "DPPO: divergence that bounds the update.", choices=("binary_tv", "binary_kl")
    )
    dppo_delta_low: float | None = arg(
        None,
        "DPPO: largest divergence where the advantage is negative; default 0.2, "
        "with binary_kl 0.05.",
        legal=NON_NEGATIVE,
    )
    dppo_delta_high: float | None = arg(
        None,
        "DPPO: largest divergence where the advantage is positive; default 0.2, "
        "with binary_kl 0.05.",
        legal=NON_NEGATIVE,
    )

    @property
    def deltas(self) -> tuple[float, float]:
        """(low, high)."""
        low = self.dppo_delta_low
        high = self.dppo_delta_high
        default = DEFAULT_DELTA[self.dppo_type]
        return (default if low is None else low), (default if high is None else high)


@register_policy_loss(
    "dppo",
    DPPOConfig,
    needs=("advantages",),  # and rollout_log_probs or old_log_probs
    correction="masks",
    alias_defaults={"dppo_tv": {"dppo_type": "binary_tv"}, "dppo_kl": {"dppo_type": "binary_kl"}},
    aliases=("dppo_tv", "dppo_kl"),
)
def dppo(inputs: LossInputs, config: DPPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens that are dropped. Warns if there are no
    rollout log-probs."""
    anchor = "rollout_log_probs"
    if inputs.rollout_log_probs is None:
        anchor = "old_log_probs"
        warnings.warn(
            "dppo: the batch has no rollout_log_probs; the trust region is around old_log_probs",
            stacklevel=2,
        )
    advantages = inputs.required("advantages")
    ratio = inputs.log_ratio(anchor).exp()
    up, down = _outside(inputs.masked(inputs.log_probs.detach()), inputs.required(anchor), config)
    dropped = ((advantages > 0) & up) | ((advantages < 0) & down)
    metrics = ratio_metrics(inputs, ratio, anchor)
    metrics["pg_clipfrac"] = masked_mean(dropped, inputs.loss_mask)
    return PolicyLossOutput(torch.where(dropped, 0.0, -advantages * ratio), metrics)


def _outside(log_p: Tensor, log_q: Tensor, config: DPPOConfig) -> tuple[Tensor, Tensor]:
    """[T] bool each: the probability is above, or below, the trust region."""
    low, high = config.deltas
    p = log_p.exp()
    q = log_q.exp()
    if config.dppo_type == "binary_tv":
        return p - q > high, q - p > low
    rest_p, rest_q = (-torch.expm1(x).clamp(max=-MIN_COMPLEMENT) for x in (log_p, log_q))
    kl = q * (log_q - log_p) + rest_q * (rest_q / rest_p).log()
    return (p > q) & (kl > high), (p < q) & (kl > low)
