"""IPO, the loss of that name in prime-rl, with the KL of Kimi K2.5, arXiv 2602.02276. (Not identity
preference optimisation, which is about pairs.)

With p and q the token's probability under the policy and the sampler, r = p / q:

    l = -A r keep + ipo_kl_coef (log r)^2,      keep = 0 where |p - q| > ipo_threshold, constant

DPPO's trust region (`dppo.py`), but for either sign of the advantage. The second term, which is
independent of the advantage, pulls tokens outside it back to the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class IPOConfig(CheckedSettings):
    ipo_threshold: float = arg(
        0.1,
        "IPO: difference of a token's probability to the sampler's above which it is dropped.",
        legal=POSITIVE,
    )
    ipo_kl_coef: float = arg(
        1e-3, "IPO: weight of the squared log-ratio to the sampler.", legal=NON_NEGATIVE
    )


@register_policy_loss(
    "ipo",
    IPOConfig,
    needs=("advantages", "rollout_log_probs"),
    correction="masks",
    homogeneous=False,
)
def ipo(inputs: LossInputs, config: IPOConfig) -> PolicyLossOutput:
    """Token losses [T]. pg_clipfrac: share of active tokens that are dropped; ipo/penalty: mean of
    the second term over active tokens."""
    anchor = "rollout_log_probs"
    advantages = inputs.required("advantages")
    log_ratio = inputs.log_ratio(anchor)
    ratio = log_ratio.exp()
    p = inputs.masked(inputs.log_probs.detach()).exp()
    q = inputs.required(anchor).exp()
    dropped = (p - q).abs() > config.ipo_threshold
    penalty = config.ipo_kl_coef * log_ratio * log_ratio
    metrics = ratio_metrics(inputs, ratio, anchor)
    metrics["pg_clipfrac"] = masked_mean(dropped, inputs.loss_mask)
    metrics["ipo/penalty"] = masked_mean(penalty, inputs.loss_mask)
    return PolicyLossOutput(torch.where(dropped, 0.0, -advantages * ratio) + penalty, metrics)
