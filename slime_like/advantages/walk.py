"""Returns and generalised advantages of the samples of an estimator: over each sample by itself, and
over the tree of an agent's episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_like.advantages.registry import TokenRewards
from slime_like.advantages.returns import discounted_returns, gae, token_rewards
from slime_like.advantages.tree_returns import TokenTree, tree_gae
from slime_like.lazy import Tensor, dist

if TYPE_CHECKING:
    from slime_like.advantages.estimate import Outcomes


def returns_of(batch: TokenRewards) -> list[Tensor]:
    """Discounted returns [R] float64 by sample, 0 at inactive tokens; see `discounted_returns`."""
    found = discounted_returns(_rewards(batch), batch.masks, batch.gamma)
    if batch.tree is None:
        return found
    whole = [1.0] * len(found)
    of_trees, _ = tree_gae(batch.tree, batch.penalties, None, batch.masks, batch.gamma, whole)
    return _chosen(batch, of_trees, found)


def gae_of(
    batch: TokenRewards, values: Sequence[Tensor], lambd: Sequence[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns), [R] float64 by sample each; see `gae`. lambd: by sample."""
    found = gae(_rewards(batch), values, batch.masks, batch.gamma, lambd)
    if batch.tree is None:
        return found
    trees = tree_gae(batch.tree, batch.penalties, values, batch.masks, batch.gamma, lambd)
    return _chosen(batch, trees[0], found[0]), _chosen(batch, trees[1], found[1])


def tree_of(
    outcomes: Outcomes,
    numbers: Tensor,
    mine: Sequence[int],
    sequences: Sequence[int] | None,
    group: dist.ProcessGroup | None,
) -> TokenTree:
    """Of `TokenRewards`.

    Args:
        outcomes: With the answers of each episode. What a function of the user's made of the rewards
            is of whole episodes, and those of answers do not count then.
        numbers: [B], what each episode got.
        mine, sequences, group: As of `estimate_advantages`.
    """
    answers = outcomes.answers or ()
    if outcomes.processed is not None:
        answers = [own and replace(own, rewards=[0.0] * len(own.rewards)) for own in answers]
    places = [0] * len(mine) if sequences is None else sequences
    return TokenTree(answers, numbers.tolist(), outcomes.lengths.tolist(), mine, places, group)


def active_tokens(batch: TokenRewards) -> list[int]:
    """Of each sample; of an agent's episode those of all its sequences."""
    own = [int(mask.sum()) for mask in batch.masks]
    tree = batch.tree
    if tree is None:
        return own
    return [tree.lengths[tree.mine[k]] if tree.has(k) else n for k, n in enumerate(own)]


def _rewards(batch: TokenRewards) -> list[Tensor]:
    return token_rewards(batch.outcomes, batch.masks, batch.penalties, batch.token_rewards)


def _chosen(
    batch: TokenRewards, of_trees: Sequence[Tensor], of_samples: Sequence[Tensor]
) -> list[Tensor]:
    """By sample; one with rewards of its tokens is one sequence, and walked over by itself."""
    assert batch.tree is not None
    given = batch.token_rewards or [None] * len(of_samples)
    return [
        own if of_tokens is not None or not batch.tree.has(k) else tree
        for k, (tree, own, of_tokens) in enumerate(zip(of_trees, of_samples, given, strict=True))
    ]
