"""Odds ratio preference optimisation, arXiv 2403.07691: pairs without a reference model.

With the mean log-prob a(y) over the active tokens of an answer, P(y) = exp(a(y)) and
odds(y) = P(y) / (1 - P(y)) (equation 4), the loss of a pair is (equations 5 to 7)

    l = -a(chosen) - lambda log sigmoid(log odds(chosen) - log odds(rejected))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_like.config import POSITIVE, CheckedSettings, arg
from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs, PolicyLossOutput
from slime_like.losses.pairs import (
    PAIR_REDUCTIONS,
    chosen_nll,
    pair_difference,
    pair_metrics,
    sequence_lengths,
)
from slime_like.losses.registry import register_policy_loss


@dataclass(frozen=True, slots=True)
class ORPOConfig(CheckedSettings):
    orpo_lambda: float = arg(
        0.1, "ORPO's lambda: weight of the odds ratio beside the NLL.", legal=POSITIVE
    )


@register_policy_loss(
    "orpo",
    ORPOConfig,
    correction="forbidden",
    required_reductions=PAIR_REDUCTIONS,
    pairs=True,
)
def orpo(inputs: LossInputs, config: ORPOConfig) -> PolicyLossOutput:
    """Token losses [T]. Metrics: see `pair_metrics`, of rewards lambda a(y); and log_odds_ratio, of
    the pairs."""
    lengths = sequence_lengths(inputs)
    log_probs = inputs.masked(inputs.log_probs)
    mean = inputs.seq_sum(log_probs / lengths)
    # a difference of sums over tokens: each answer's is spread over its tokens
    difference = pair_difference(inputs, log_odds(mean) / lengths)
    losses = chosen_nll(inputs) - config.orpo_lambda * torch.nn.functional.logsigmoid(difference)
    metrics = pair_metrics(inputs, lengths, config.orpo_lambda * mean.detach())
    scores = pair_metrics(inputs, lengths, log_odds(mean.detach()))
    return PolicyLossOutput(losses, {**metrics, "log_odds_ratio": scores["pair_margin"]})


def log_odds(mean: Tensor) -> Tensor:
    """log(P / (1 - P)) of P = exp(mean), for mean <= 0."""
    # P = 1 within rounding: its odds would be infinite, and their gradient NaN
    mean = mean.clamp(max=-torch.finfo(mean.dtype).eps)
    # log(1 - exp(mean)), exact at both ends; where() would carry the NaN of the branch not taken
    near = mean > -math.log(2)
    close = torch.where(near, mean, -1.0)
    far = torch.where(near, -1.0, mean)
    rest = torch.where(near, torch.log(-torch.expm1(close)), torch.log1p(-torch.exp(far)))
    return mean - rest
