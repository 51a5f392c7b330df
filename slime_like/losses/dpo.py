"""Direct preference optimisation, arXiv 2305.18290, and variants of its loss.

With the log-ratio of answer y to prompt x, summed over its active tokens,

    r(y) = log pi(y | x) - log pi_ref(y | x)        h = r(chosen) - r(rejected)

the loss l of a pair is, with beta, label smoothing e and z = log sigmoid:

    sigmoid  l = -(1 - e) z(beta h) - e z(-beta h)                  eq. 7; e > 0: conservative DPO
    robust   l = (-(1 - e) z(beta h) + e z(-beta h)) / (1 - 2 e)    arXiv 2403.00409, eq. 12
    hinge    l = max(0, 1 - beta h)                                 SLiC, arXiv 2305.10425
    ipo      l = (h - 1 / (2 beta))^2                               arXiv 2310.12036, eq. 17

For ipo r is the mean over the tokens, as its authors compute it and TRL does. dpo_nll_coef adds the
mean negative log-prob of the chosen answer by token, as in arXiv 2404.19733 (TRL's rpo_alpha).
Nothing is clamped: r is a sum over a whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import NON_NEGATIVE, POSITIVE, CheckedSettings, Range, arg
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

DPO_TYPES = ("sigmoid", "robust", "hinge", "ipo")
_BELOW_HALF = Range("0 <= x < 0.5", lambda x: 0 <= x < 0.5)


@dataclass(frozen=True, slots=True)
class DPOConfig(CheckedSettings):
    dpo_beta: float = arg(
        0.1, "DPO's beta: strength of the constraint to the reference model.", legal=POSITIVE
    )
    dpo_loss_type: str = arg(
        "sigmoid",
        "Loss of a pair as a function of its log-ratios to the reference.",
        choices=DPO_TYPES,
    )
    dpo_label_smoothing: float = arg(
        0.0,
        "Label smoothing: assumed fraction of pairs with swapped labels (sigmoid, robust).",
        legal=_BELOW_HALF,
        needs="dpo_loss_type=sigmoid|dpo_loss_type=robust",
    )
    dpo_nll_coef: float = arg(
        0.0,
        "Weight of the mean NLL of the chosen answers, added to the loss.",
        legal=NON_NEGATIVE,
        aliases=("--rpo-alpha",),
    )


@register_policy_loss(
    "dpo",
    DPOConfig,
    needs=("ref_log_probs",),
    correction="forbidden",
    required_reductions=PAIR_REDUCTIONS,
    pairs=True,
)
def dpo(inputs: LossInputs, config: DPOConfig) -> PolicyLossOutput:
    """Token losses [T]. Metrics: see `pair_metrics`, of rewards beta r(y)."""
    lengths = sequence_lengths(inputs)
    log_ratio = inputs.masked(inputs.log_probs) - inputs.required("ref_log_probs")
    if config.dpo_loss_type == "ipo":
        log_ratio = log_ratio / lengths
    losses = pair_losses(pair_difference(inputs, log_ratio), config)
    if config.dpo_nll_coef:
        losses = losses + config.dpo_nll_coef * chosen_nll(inputs)
    rewards = config.dpo_beta * inputs.seq_sum(log_ratio.detach())
    return PolicyLossOutput(losses, pair_metrics(inputs, lengths, rewards))


def pair_losses(h: Tensor, config: DPOConfig) -> Tensor:
    """Loss of each pair, shaped as h, its difference of log-ratios."""
    beta = config.dpo_beta
    noise = config.dpo_label_smoothing
    if config.dpo_loss_type == "hinge":
        return torch.relu(1 - beta * h)
    if config.dpo_loss_type == "ipo":
        return (h - 1 / (2 * beta)).square()
    right = -torch.nn.functional.logsigmoid(beta * h)
    if not noise:
        return right
    wrong = -torch.nn.functional.logsigmoid(-beta * h)
    if config.dpo_loss_type == "robust":
        return ((1 - noise) * right - noise * wrong) / (1 - 2 * noise)
    return (1 - noise) * right + noise * wrong
