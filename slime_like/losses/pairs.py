"""Preference losses, which compare two answers to one prompt.

Sequences 2j and 2j + 1 of a micro-batch are the chosen and the rejected answer of pair j. Step plan
and packing keep them together (`PolicyLoss.pairs`), and sums over context-parallel ranks are exact
with their gradients (ranks.py), so results are equal in every layout.

The loss of a pair is placed on every active token of both answers. Under a mean over sequences each
answer has weight 1 / (2 pairs), so the loss of the step is the mean over its pairs.
"""

from __future__ import annotations

from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs
from slime_like.losses.ranks import sum_over_ranks
from slime_like.metrics.typed import Metric

# legal reductions of such a loss
PAIR_REDUCTIONS = ("sequence_mean", "rollout_mean")


def is_chosen(inputs: LossInputs) -> Tensor:
    """[T] bool: rows of the chosen answers."""
    return inputs.seq_ids % 2 == 0


def pair_difference(inputs: LossInputs, x: Tensor) -> Tensor:
    """Sum of x over the active tokens of the chosen answer minus that of the rejected one, on every
    row of both: [T] -> [T], differentiable."""
    x = inputs.masked(torch.where(is_chosen(inputs), x, -x))
    pairs = inputs.seq_ids // 2
    local = x.new_zeros((inputs.num_seqs + 1) // 2).index_add(0, pairs, x)
    return sum_over_ranks(local, inputs.cp_group).index_select(0, pairs)


def chosen_nll(inputs: LossInputs) -> Tensor:
    """Token losses [T] of which the mean over pairs is the NLL of the chosen answers. Doubled: the
    tokens of one answer have half of the pair's weight."""
    return torch.where(is_chosen(inputs), -2 * inputs.masked(inputs.log_probs), 0.0)


def sequence_lengths(inputs: LossInputs) -> Tensor:
    """Active tokens of each sequence, at least 1, on every row of it: [T], constant."""
    return inputs.seq_sum(torch.ones_like(inputs.log_probs.detach())).clamp(min=1)


def pair_metrics(inputs: LossInputs, lengths: Tensor, scores: Tensor) -> dict[str, Metric]:
    """Metrics of preference pairs. scores: [T], the score of an answer on each of its rows.

    pair_accuracy: share of pairs where the chosen answer has the higher score. chosen_reward,
    rejected_reward and pair_margin: mean scores, and their mean difference.
    """
    scores = inputs.masked(scores.detach())
    share = torch.where(inputs.loss_mask, 1.0 / lengths, 0.0)
    chosen = is_chosen(inputs)
    margin = pair_difference(inputs, scores / lengths)

    def mean(x: Tensor, weights: Tensor) -> Metric:
        return Metric("mean", (weights * x).sum(), weights.sum())

    return {
        "pair_accuracy": mean((margin > 0).to(share), share),
        "pair_margin": mean(margin, share),
        "chosen_reward": mean(scores, torch.where(chosen, share, 0.0)),
        "rejected_reward": mean(scores, torch.where(chosen, 0.0, share)),
    }
