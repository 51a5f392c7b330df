"""Shared by clip_cov and kl_cov: per-token covariance of advantage and log-prob, and the selection
of tokens by it.

arXiv 2505.22617: cov = (A - mean A)(log_prob - mean log_prob). Means and the number of selected
tokens are per micro-batch, as in other implementations, so these two losses depend on how a step is
split into micro-batches. Context-parallel ranks select jointly, with the same result as one
process.
"""

from __future__ import annotations

from slime_like.lazy import Tensor, torch
from slime_like.losses.inputs import LossInputs
from slime_like.losses.ranks import gather_over_ranks, sum_over_ranks


def covariances(inputs: LossInputs) -> Tensor:
    """Covariance of each token, [T] float64, detached; 0 at inactive tokens. float64 makes it
    exactly 0 if all tokens share one advantage; rounding noise would select other tokens in another
    layout."""
    advantages = inputs.required("advantages").double()
    log_probs = inputs.masked(inputs.log_probs.detach()).double()
    local = torch.stack([advantages.sum(), log_probs.sum(), inputs.loss_mask.sum().double()])
    advantage_sum, log_prob_sum, count = sum_over_ranks(local, inputs.cp_group)
    count = count.clamp(min=1)
    return inputs.masked((advantages - advantage_sum / count) * (log_probs - log_prob_sum / count))


def random_order(inputs: LossInputs) -> Tensor:
    """[T] uniform draws, equal for a token in every layout: drawn on the host from the selection
    seed and the token's index in the micro-batch."""
    generator = torch.Generator().manual_seed(inputs.selection_seed)
    ranks = 1 if inputs.cp_group is None else inputs.cp_group.size()
    device = inputs.loss_mask.device
    count = ranks * inputs.loss_mask.numel()
    # from pinned memory, so that the host does not wait for the device
    pinned = device.type == "cuda"
    draws = torch.rand(count, generator=generator, pin_memory=pinned).to(device, non_blocking=True)
    if inputs.places is None:
        return draws[: inputs.loss_mask.numel()]
    return draws[inputs.places]


def pick(candidates: Tensor, order: Tensor, share: float, inputs: LossInputs) -> Tensor:
    """Select the max(1, floor(share * N)) candidates with the largest `order`, N being the number
    of active tokens; all candidates if there are fewer.

    Args:
        candidates: [T] bool.
        order: [T]; ties go to the earlier token.

    Returns:
        [T] bool, without a device synchronisation.
    """
    num_active = sum_over_ranks(inputs.loss_mask.sum(), inputs.cp_group).double()
    wanted = (num_active * share).floor().clamp(min=1)
    order = gather_over_ranks(order.masked_fill(~candidates, float("-inf")), inputs.cp_group)
    if inputs.places is None:
        best_first = order.argsort(descending=True, stable=True)
    else:
        by_place = gather_over_ranks(inputs.places, inputs.cp_group).argsort(stable=True)
        best_first = by_place[order[by_place].argsort(descending=True, stable=True)]
    positions = torch.arange(best_first.numel(), device=best_first.device)
    rank = torch.empty_like(best_first).scatter_(0, best_first, positions)
    if inputs.cp_group is not None:
        rows = inputs.loss_mask.numel()
        rank = rank[inputs.cp_group.rank() * rows :][:rows]
    return candidates & (rank < wanted)
