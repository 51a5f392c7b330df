"""OTB, arXiv 2602.07078: the minimum-variance baseline of each token of a group, from the
probabilities of the forward pass alone.

    A_t = G_t - B_t,    B_t = sum_i W_it G_it / sum_i W_it
    W_it = sum_{s <= t} (1 - 2 pi_is + sum_v pi_isv^2)

over the responses i of the group that have a t-th active token. The term in brackets is the squared
norm of the gradient of the sampled token's log-prob by the logits; W accumulates this energy. G_t
is the discounted return of the token rewards, KL penalty included. A response without others at t
is its own baseline, so A_t = 0.

As in verl's tir_optimal_token_baseline the t-th active tokens are compared; verl can also leave the
end of the longest response without a baseline, and weight W by importance weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.advantages.registry import TokenRewards, register_token_estimator
from slime_like.advantages.returns import discounted_returns, scatter_active, token_rewards
from slime_like.lazy import Tensor, torch

MIN_ENERGY = 1e-12  # equal weights in a group of zero energy


def token_energies(
    log_probs: Sequence[Tensor], squared_probs: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[Tensor]:
    """1 - 2 pi + sum of pi^2, >= 0: [R] float64 per sample, 0 at inactive tokens.

    Args:
        log_probs: [R] per sample, of the sampled tokens.
        squared_probs: [R] per sample, sums over the vocabulary.
        masks: [R] bool per sample, active tokens.
    """
    energies = []
    for log_prob, squared, mask in zip(log_probs, squared_probs, masks, strict=True):
        energy = 1 - 2 * log_prob.double().exp() + squared.double()
        energies.append(torch.where(mask, energy.clamp(min=0), 0.0))
    return energies


@register_token_estimator(
    "otb",
    needs_energies=True,
    needs_peers=True,
    takes_token_rewards=True,
    aliases=("optimal_token_baseline",),
)
def otb(batch: TokenRewards) -> list[Tensor]:
    """A_t = G_t - B_t, [R] per sample. Collective over the ranks that share the rollout."""
    energies = batch.energies
    peers = batch.peers
    if energies is None or peers is None:
        raise ValueError("--advantage-estimator otb needs the energy of every token (energies)")
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, batch.token_rewards)
    returns = discounted_returns(rewards, batch.masks, batch.gamma)
    # subtract one reward of the group, so that equal rewards give exactly 0
    centred = [
        value[mask] - reference
        for value, mask, reference in zip(returns, batch.masks, peers.references)
    ]
    sums = torch.zeros(2, peers.num_groups, peers.max_length, dtype=torch.float64)
    for i, value in enumerate(centred):
        if peers.valid[i]:
            weight = energies[i][batch.masks[i]].cumsum(0) + MIN_ENERGY
            sums[0, peers.group_index[i], : value.numel()] += weight * value
            sums[1, peers.group_index[i], : value.numel()] += weight
    weighted, weights = peers.all_reduce(sums)
    baseline = torch.where(weights > 0, weighted / weights, 0.0)
    advantages = []
    for value, mask, group in zip(centred, batch.masks, peers.group_index):
        advantages.append(scatter_active(value - baseline[group, : value.numel()], mask))
    return advantages
