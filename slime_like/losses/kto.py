"""Kahneman-Tversky optimisation, arXiv 2402.01306: single answers, each desirable or not.

With the log-ratio of answer y to prompt x, summed over its active tokens,

    r(y) = log pi(y | x) - log pi_ref(y | x)

and weights D, U of the two kinds of answers, the loss of an answer is lambda_y - v (equation 8):

    desirable    l = D (1 - sigmoid(beta (r(y) - z)))
    undesirable  l = U (1 - sigmoid(beta (z - r(y))))

The reference point z estimates KL(pi || pi_ref) from mismatched answers, each row's prompt with the
answer of the next row, and is a constant of the gradient:

    z = max(0, mean over rows i of  log pi(y_{i+1} | x_i) - log pi_ref(y_{i+1} | x_i))

The paper takes it per micro-batch. Here it is of the whole optimizer step, with the policy before
it (`batching/builder.py`), so that it depends neither on the layout nor on the cut of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.pairs import PAIR_REDUCTIONS, sequence_lengths
from slime_like.losses.registry import register_policy_loss
from slime_like.metrics.typed import Metric, masked_mean


@dataclass(frozen=True, slots=True)
class KTOConfig(CheckedSettings):
    kto_beta: float = arg(
        0.1, "KTO's beta: strength of the constraint to the reference model.", legal=POSITIVE
    )
    kto_desirable_weight: float = arg(1.0, "Weight of desirable answers.", legal=POSITIVE)
    kto_undesirable_weight: float = arg(1.0, "Weight of undesirable answers.", legal=POSITIVE)


@register_policy_loss(
    "kto",
    KTOConfig,
    needs=("ref_log_probs", "rewards", "reference_points"),
    correction="forbidden",
    required_reductions=PAIR_REDUCTIONS,
    policy_gradient=False,
    mismatched=True,
)
def kto(inputs: LossInputs, config: KTOConfig) -> PolicyLossOutput:
    """Token losses [T]; rewards are 1 for desirable answers and 0 for others. Metrics:
    chosen_reward and rejected_reward, means of beta r(y) over the answers of either kind, and
    reference_point, z."""
    log_ratio = inputs.masked(inputs.log_probs) - inputs.required("ref_log_probs")
    ratio = inputs.seq_sum(log_ratio)
    point = inputs.required("reference_points")
    desirable = inputs.required("rewards") > 0.5
    gain = config.kto_beta * (ratio - point)
    gain = torch.where(desirable, gain, -gain)
    weight = torch.full_like(gain, config.kto_desirable_weight)
    weight = weight.masked_fill(~desirable, config.kto_undesirable_weight)
    losses = weight * torch.sigmoid(-gain)
    share = torch.where(inputs.loss_mask, 1.0 / sequence_lengths(inputs), 0.0)
    rewards = inputs.masked(config.kto_beta * ratio.detach())

    def mean(of: Tensor) -> Metric:
        weights = torch.where(of, share, 0.0)
        return Metric("mean", (weights * rewards).sum(), weights.sum())

    metrics = {
        "chosen_reward": mean(desirable),
        "rejected_reward": mean(~desirable),
        "reference_point": masked_mean(point, inputs.loss_mask),
    }
    return PolicyLossOutput(losses, metrics)
