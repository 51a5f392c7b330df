"""Returns and generalised advantages over the trees of agents' episodes, independent of how a tree
is split into sequences and of the ranks that train on these.

The successors of a token are the next token of its turn, and after the last token of a turn a
the first of each turn c that continues a. Every trained token of an episode has the same weight u
in the loss (`step_weights`), so these transitions have equal weights: what follows a is the mean
over its continuations. Bellman's equation and that of generalised advantages (`returns.gae`) at a
token t with successors n(t):

    V'_t = mean_{c in n(t)} V_c,    delta_t = R_t + gamma V'_t - V_t,
    A_t = delta_t + gamma lambda mean_{c in n(t)} A_c

With V = 0 and lambda 1 these are discounted returns. R_t has minus the penalty of the token; at the
last token of a turn also the turn's own reward; and at the last token of a leaf also the
episode's reward without those of its turns. A conversation without forks is one sequence as in
`returns.py`. Continuations without a trained token have no weight and are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.advantages.episodes import TokenTree
from slime_like.advantages.registry import TokenRewards
from slime_like.advantages.returns import discounted_returns, gae, token_rewards
from slime_like.advantages.whitening import all_reduce
from slime_like.lazy import Tensor, torch


def batch_returns(batch: TokenRewards) -> list[Tensor]:
    """Discounted returns [R] float64 per sample, 0 at inactive tokens; see `discounted_returns`."""
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, batch.token_rewards)
    returns = discounted_returns(rewards, batch.masks, batch.gamma)
    if batch.tree is None:
        return returns
    lambd = [1.0] * len(returns)
    in_trees, _ = tree_gae(batch.tree, batch.penalties, None, batch.masks, batch.gamma, lambd)
    return _select(batch, in_trees, returns)


def batch_gae(
    batch: TokenRewards, values: Sequence[Tensor], lambd: Sequence[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """(advantages, returns), [R] float64 per sample each; see `gae`. lambd: per sample."""
    rewards = token_rewards(batch.outcomes, batch.masks, batch.penalties, batch.token_rewards)
    advantages, returns = gae(rewards, values, batch.masks, batch.gamma, lambd)
    if batch.tree is None:
        return advantages, returns
    in_trees = tree_gae(batch.tree, batch.penalties, values, batch.masks, batch.gamma, lambd)
    return _select(batch, in_trees[0], advantages), _select(batch, in_trees[1], returns)


def _select(
    batch: TokenRewards, in_trees: Sequence[Tensor], in_sequences: Sequence[Tensor]
) -> list[Tensor]:
    """Per sample, the values over its tree if it has one. A sample with token rewards is a single
    sequence."""
    assert batch.tree is not None
    rewards = batch.token_rewards or [None] * len(in_sequences)
    result = []
    for k, of_tokens in enumerate(rewards):
        use_tree = of_tokens is None and batch.tree.has(k)
        result.append(in_trees[k] if use_tree else in_sequences[k])
    return result


def active_tokens(batch: TokenRewards) -> list[int]:
    """Active tokens of each sample; for an agent's episode, of all its sequences."""
    counts = [int(mask.sum()) for mask in batch.masks]
    if (tree := batch.tree) is not None:
        for k, i in enumerate(tree.local_indices):
            if tree.has(k):
                counts[k] = tree.lengths[i]
    return counts


@dataclass(slots=True)
class _Nodes:
    """The turns of all episodes, as nodes of a forest."""

    offsets: list[int] = field(default_factory=list)  # first node of each episode
    parents: list[int] = field(default_factory=list)  # -1: root
    # whether a token of it or of a continuation is trained
    alive: list[bool] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)  # those alive

    def mean(self, node: int, values: Sequence[float]) -> float:
        """Mean over the node's children, 0 without any."""
        children = self.children[node]
        return sum(values[c] for c in children) / len(children) if children else 0.0


@dataclass(frozen=True, slots=True)
class _Segment:
    """The trained tokens of a turn in a sample of this rank."""

    node: int
    sample: int
    positions: Tensor


def tree_gae(
    tree: TokenTree,
    penalties: Sequence[Tensor],
    values: Sequence[Tensor] | None,
    masks: Sequence[Tensor],
    gamma: float,
    lambd: Sequence[float],
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns; collective over `tree.group`.

    Args:
        penalties: [R] per sample of this rank, read at active tokens only.
        values: [R] per sample, a critic's; None: 0.
        masks: [R] bool per sample, active tokens.
        gamma: 0 to 1.
        lambd: 0 to 1 per sample, equal for all samples of an episode.

    Returns:
        (advantages, returns), [R] float64 per sample each, 0 at inactive tokens and in samples of
        episodes without a record.
    """
    nodes = _make_nodes(tree)
    segments = _make_segments(tree, nodes, masks)
    values = values or [torch.zeros(mask.numel()) for mask in masks]
    # a turn is on one rank, so a sum over ranks gives every rank the numbers of all turns
    local = torch.zeros(len(nodes.parents), 2, dtype=torch.float64)
    for segment in segments:
        local[segment.node, 0] += segment.positions.numel()
        local[segment.node, 1] = values[segment.sample][segment.positions[0]].double()
    counts, first_values = (row.tolist() for row in all_reduce(local, tree.group).unbind(1))
    _prune(nodes, counts)
    next_values = _next_values(nodes, counts, first_values)
    end_rewards = _end_rewards(tree, nodes)
    partial = _segment_gae(segments, penalties, values, end_rewards, next_values, gamma, lambd)
    local.zero_()
    for segment, advantage in zip(segments, partial, strict=True):
        local[segment.node, 0] = advantage[0]
        local[segment.node, 1] = (gamma * lambd[segment.sample]) ** segment.positions.numel()
    starts, decays = (row.tolist() for row in all_reduce(local, tree.group).unbind(1))
    for node in reversed(range(len(counts))):
        if not counts[node]:  # without a trained token, it passes on what follows it
            starts[node], decays[node] = end_rewards[node], 1.0
        starts[node] += decays[node] * nodes.mean(node, starts)
    advantages = [torch.zeros(mask.numel(), dtype=torch.float64) for mask in masks]
    for segment, advantage in zip(segments, partial, strict=True):
        left = torch.arange(segment.positions.numel(), 0, -1, dtype=torch.float64)
        carried = (gamma * lambd[segment.sample]) ** left * nodes.mean(segment.node, starts)
        advantages[segment.sample][segment.positions] = advantage + carried
    returns = list(advantages)
    for k, (value, mask) in enumerate(zip(values, masks, strict=True)):
        if tree.has(k):
            returns[k] = torch.where(mask, advantages[k] + value.double(), 0.0)
    return advantages, returns


def _make_nodes(tree: TokenTree) -> _Nodes:
    nodes = _Nodes()
    for episode in tree.episodes:
        offset = len(nodes.parents)
        nodes.offsets.append(offset)
        if episode is not None:
            nodes.parents += [-1 if p < 0 else offset + p for p in episode.parents]
    return nodes


def _make_segments(tree: TokenTree, nodes: _Nodes, masks: Sequence[Tensor]) -> list[_Segment]:
    segments = []
    for k, (i, mask) in enumerate(zip(tree.local_indices, masks, strict=True)):
        if (episode := tree.episodes[i]) is None:
            continue
        for first, count, turn in episode.spans[tree.sequences[k]]:
            positions = mask[first : first + count].nonzero().flatten() + first
            if positions.numel():
                segments.append(_Segment(nodes.offsets[i] + turn, k, positions))
    return segments


def _prune(nodes: _Nodes, counts: Sequence[float]) -> None:
    """Set `alive` and `children`. counts: trained tokens of each turn."""
    nodes.children = [[] for _ in counts]
    nodes.alive = [False] * len(counts)
    for node in reversed(range(len(counts))):  # continuations have larger indices
        nodes.alive[node] = counts[node] > 0 or bool(nodes.children[node])
        if nodes.alive[node] and nodes.parents[node] >= 0:
            nodes.children[nodes.parents[node]].append(node)


def _next_values(nodes: _Nodes, counts: Sequence[float], first_values: list[float]) -> list[float]:
    """Mean value of the continuations of each turn. first_values: value of its first token; set
    here for turns without a trained token."""
    result = [0.0] * len(counts)
    for node in reversed(range(len(counts))):
        result[node] = nodes.mean(node, first_values)
        if not counts[node]:
            first_values[node] = result[node]
    return result


def _end_rewards(tree: TokenTree, nodes: _Nodes) -> list[float]:
    """Reward of each turn's last token: r_a, the turn's own, and at a leaf also R - sum_b r_b.

    R is the episode's reward, which includes those of its turns; the sum is over the turns b with a
    trained token in them or after them, so that no reward of a pruned turn is lost.
    """
    rewards = [0.0] * len(nodes.parents)
    for offset, episode, outcome in zip(nodes.offsets, tree.episodes, tree.outcomes, strict=True):
        if episode is None:
            continue
        alive = [turn for turn in range(len(episode.parents)) if nodes.alive[offset + turn]]
        outcome_alone = outcome - sum(episode.rewards[turn] for turn in alive)
        for turn in alive:
            rewards[offset + turn] = episode.rewards[turn]
            if not nodes.children[offset + turn]:  # a leaf
                rewards[offset + turn] += outcome_alone
    return rewards


def _segment_gae(
    segments: Sequence[_Segment],
    penalties: Sequence[Tensor],
    values: Sequence[Tensor],
    end_rewards: Sequence[float],
    next_values: Sequence[float],
    gamma: float,
    lambd: Sequence[float],
) -> list[Tensor]:
    """Advantages of the tokens of each turn, without those of its continuations."""
    rewards = []
    for segment in segments:
        reward = -penalties[segment.sample][segment.positions].double()
        reward[-1] += end_rewards[segment.node] + gamma * next_values[segment.node]
        rewards.append(reward)
    advantages, _ = gae(
        rewards,
        [values[segment.sample][segment.positions] for segment in segments],
        [torch.ones(segment.positions.numel(), dtype=torch.bool) for segment in segments],
        gamma,
        [lambd[segment.sample] for segment in segments],
    )
    return advantages
