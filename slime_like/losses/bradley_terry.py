"""Bradley-Terry: the loss of a reward model on pairs of answers, Ouyang et al., arXiv 2203.02155,
equation 1.

With the score r(y) of an answer, which a scalar head gives at its last token, and the margin m of
the pair (arXiv 2307.09288, equation 2; 0 without one):

    l = -log sigmoid(r(chosen) - r(rejected) - m) + rm_center_coef (r(chosen) + r(rejected))^2

The second term keeps scores around 0 (arXiv 2312.09244, TRL's center_rewards_coefficient).
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, CheckedSettings, arg
from slime_like.lazy import torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.pairs import (
    PAIR_REDUCTIONS,
    is_chosen,
    pair_difference,
    pair_metrics,
    sequence_lengths,
)
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class BradleyTerryConfig(CheckedSettings):
    rm_center_coef: float = arg(
        0.0,
        "Weight of the squared sum of a pair's scores, which keeps them around 0.",
        legal=NON_NEGATIVE,
        aliases=("--center-rewards-coefficient",),
    )


@register_policy_loss(
    "bradley_terry",
    BradleyTerryConfig,
    correction="forbidden",
    required_reductions=PAIR_REDUCTIONS,
    pairs=True,
    scores=True,
)
def bradley_terry(inputs: LossInputs, config: BradleyTerryConfig) -> PolicyLossOutput:
    """Token losses [T]; log_probs are scores, with one active row per sequence, and rewards, if
    any, are margins. Metrics: `pair_metrics` of the scores."""
    scores = inputs.masked(inputs.log_probs)
    difference = pair_difference(inputs, scores)
    if inputs.rewards is not None:
        margins = torch.where(is_chosen(inputs), inputs.required("rewards").nan_to_num(), 0.0)
        difference = difference - pair_difference(inputs, margins)
    losses = -torch.nn.functional.logsigmoid(difference)
    if config.rm_center_coef:
        total = pair_difference(inputs, torch.where(is_chosen(inputs), scores, -scores))
        losses = losses + config.rm_center_coef * total.square()
    return PolicyLossOutput(losses, pair_metrics(inputs, sequence_lengths(inputs), scores))
