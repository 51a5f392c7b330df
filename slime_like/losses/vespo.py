"""VESPO: variational sequence-level soft policy optimisation, arXiv 2602.10693: a smooth weight of
the whole sequence's ratio.

    W = exp(clamp(sum of d over the sequence, log 1e-8, 20))
    l = -sg(phi) A log_prob,      phi = exp(lambda + k log W - lambda W)

phi is 1 on-policy and largest at W = k / lambda; (k, lambda) is one pair where A >= 0 and another
elsewhere. TRL reduces it by token_mean.

Off-policy correction: before the clamp, W is multiplied by the importance weights, the product over
the kept tokens or the weight of the sequence. The log-ratio keeps the original mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import (
    LossInputs,
    PolicyLossOutput,
    ratio_metrics,
    sequence_mean_metric,
)
from slime_like.losses.registry import register_policy_loss

LOG_WEIGHT_RANGE = (math.log(1e-8), 20.0)


@dataclass(frozen=True, slots=True)
class VESPOConfig(CheckedSettings):
    vespo_k_pos: float = arg(
        2.0,
        "VESPO: power of the sequence ratio where the advantage is not negative.",
        legal=POSITIVE,
    )
    vespo_lambda_pos: float = arg(
        3.0,
        "VESPO: decay in the sequence ratio where the advantage is not negative.",
        legal=POSITIVE,
    )
    vespo_k_neg: float = arg(
        3.0, "VESPO: power of the sequence ratio where the advantage is negative.", legal=POSITIVE
    )
    vespo_lambda_neg: float = arg(
        2.0, "VESPO: decay in the sequence ratio where the advantage is negative.", legal=POSITIVE
    )


@register_policy_loss(
    "vespo", VESPOConfig, needs=("advantages", "old_log_probs"), correction="internal"
)
def vespo(inputs: LossInputs, config: VESPOConfig) -> PolicyLossOutput:
    """Token losses [T]. vespo/phi_seq_mean: mean weight over sequences with active tokens."""
    advantages = inputs.required("advantages")
    log_ratio = inputs.log_ratio().detach()
    log_weight = inputs.seq_sum(log_ratio)
    if inputs.importance_weights is not None:
        log_c = torch.where(inputs.kept, inputs.required("importance_weights"), 1.0).log()
        total = inputs.seq_sum(log_c)
        if inputs.importance_level == "sequence":
            total = total / inputs.seq_sum(inputs.kept.to(total.dtype)).clamp(min=1)
        log_weight = log_weight + total
    log_weight = log_weight.clamp(*LOG_WEIGHT_RANGE)
    negative = advantages < 0
    k = torch.full_like(log_weight, config.vespo_k_pos).masked_fill(negative, config.vespo_k_neg)
    decay = torch.full_like(log_weight, config.vespo_lambda_pos)
    decay = decay.masked_fill(negative, config.vespo_lambda_neg)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    metrics = ratio_metrics(inputs, log_ratio.exp())
    metrics["vespo/phi_seq_mean"] = sequence_mean_metric(inputs, phi)
    return PolicyLossOutput(inputs.policy_gradient(phi * advantages), metrics)
