"""DRO: direct reward optimisation, arXiv 2405.19107, per token: l = -A log_prob + beta / 2 d^2.

The paper squares the log-ratio of the sequence; here, as in verl and ROLL, that of each token is
squared. kimi.py is the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.losses.inputs import LossInputs, PolicyLossOutput, ratio_metrics
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import masked_mean


@dataclass(frozen=True, slots=True)
class DROConfig(CheckedSettings):
    dro_beta: float | None = arg(
        None,
        "DRO: weight of the squared log-ratio; has no default.",
        legal=POSITIVE,
        required_with="policy_loss_type=dro",
    )


def quadratic(inputs: LossInputs, coef: float, name: str) -> PolicyLossOutput:
    """-A log_prob + coef / 2 d^2 [T], with metrics name/policy and name/penalty, the means of the
    two parts over active tokens."""
    log_ratio = inputs.log_ratio()
    policy = inputs.policy_gradient(inputs.required("advantages"))
    penalty = coef / 2 * log_ratio * log_ratio
    metrics = ratio_metrics(inputs, log_ratio.exp())
    metrics[f"{name}/policy"] = masked_mean(policy, inputs.loss_mask)
    metrics[f"{name}/penalty"] = masked_mean(penalty, inputs.loss_mask)
    return PolicyLossOutput(policy + penalty, metrics)


@register_policy_loss("dro", DROConfig, needs=("advantages", "old_log_probs"), homogeneous=False)
def dro(inputs: LossInputs, config: DROConfig) -> PolicyLossOutput:
    """Token losses [T]. Raises ValueError without a beta."""
    if config.dro_beta is None:
        raise ValueError("policy loss dro needs --dro-beta > 0")
    return quadratic(inputs, config.dro_beta, "dro")
