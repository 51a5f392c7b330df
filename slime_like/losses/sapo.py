"""SAPO: soft adaptive policy optimisation, arXiv 2511.20347.

    l = -A (4 / tau) sigmoid(tau (r - 1)),    tau = tau_pos where A > 0, else tau_neg
    dl / d log_prob = -A r sech^2(tau (r - 1) / 2)

A soft gate in place of a clip: at r = 1 the gradient is -A for any tau. The value carries an offset
of -2A / tau, so with different temperatures the reported loss is not 0 on-policy; judge a run by
sapo_grad_weight (1 on-policy).
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import LOG_RATIO_CLAMP, LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class SAPOConfig(CheckedSettings):
    sapo_tau_pos: float = arg(
        1.0, "SAPO: temperature of the gate where the advantage is positive.", legal=POSITIVE
    )
    sapo_tau_neg: float = arg(
        1.05, "SAPO: temperature of the gate elsewhere; larger decays faster.", legal=POSITIVE
    )
    sapo_ratio_level: str = arg(
        "token",
        "SAPO: ratio of each token, or GSPO's ratio of the full sequence or of each turn of an "
        "agent.",
        choices=("token", "sequence", "turn"),
    )


@register_policy_loss(
    "sapo",
    SAPOConfig,
    needs=("advantages", "old_log_probs"),
    recommended_reductions=("sequence_mean", "rollout_mean"),
)
def sapo(inputs: LossInputs, config: SAPOConfig) -> PolicyLossOutput:
    """Token losses [T]."""
    advantages = inputs.required("advantages")
    level = config.sapo_ratio_level
    log_ratio = inputs.log_ratio() if level == "token" else inputs.sequence_log_ratio(level)
    ratio = log_ratio.exp()
    # not torch.where() with two Python numbers, which would round them to float32
    tau = torch.full_like(ratio, config.sapo_tau_neg)
    tau = tau.masked_fill(advantages > 0, config.sapo_tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1))
    metrics = ratio_metrics(inputs, ratio)
    # sech^2(x / 2) = 4 sigmoid(x) (1 - sigmoid(x)); beyond the clamp there is no gradient
    weight = ratio * 4 * gate * (1 - gate) * (log_ratio.abs() < LOG_RATIO_CLAMP)
    metrics["sapo_grad_weight"] = masked_mean(weight, inputs.loss_mask)
    metrics["sapo_gate"] = masked_mean(gate, inputs.loss_mask)
    return PolicyLossOutput(-advantages * (4 / tau) * gate, metrics)
