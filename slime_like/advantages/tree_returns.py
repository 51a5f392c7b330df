"""Returns and generalised advantages over the trees of agents' episodes, whatever the cut of a tree
into sequences and wherever these are trained on.

A token's next one is the next of its answer, and after the last of an answer a the first of each
answer c that continues a. Every trained token of an episode has the same weight u in the loss
(`step_weights`), so that those transitions have equal weights: what follows a is the mean over its
continuations. Bellman's equation and that of generalised advantages (`returns.gae`) then say, at a
token t with the next ones n(t):

    V'_t = mean_{c in n(t)} V_c,    delta_t = R_t + gamma V'_t - V_t,    A_t = delta_t + gamma lambda mean_{c in n(t)} A_c

with V = 0 and lambda 1 these are discounted returns. R_t has minus the penalty of the token; at the
last token of an answer the answer's own reward; and at the last of one that nothing continues what
the episode got without the rewards of its answers. A conversation without forks is one sequence as
in `returns.py`. Continuations in which no token is trained have no weight, and are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slime_like.advantages.registry import EpisodeAnswers
from slime_like.advantages.returns import gae
from slime_like.advantages.whitening import sum_over
from slime_like.lazy import Tensor, dist, torch


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The answers of a rollout's episodes, for the samples of this rank.

    episodes: of all ranks, None where one has no record of its answers. outcomes: [B] float64, what
    each got with the rewards of its answers. lengths: trained tokens of each. mine, sequences: by
    sample of this rank, its episode and its place among the sequences of that. group: data-parallel
    ranks, which walk together.
    """

    episodes: Sequence[EpisodeAnswers | None]
    outcomes: Sequence[float]
    lengths: Sequence[int]
    mine: Sequence[int]
    sequences: Sequence[int]
    group: dist.ProcessGroup | None = None

    def has(self, k: int) -> bool:
        """Whether the k-th sample of this rank is of an episode with a record."""
        return self.episodes[self.mine[k]] is not None


@dataclass(slots=True)
class _Nodes:
    """All answers. offsets: of each episode's first; parents: -1 for none; alive: a token of it or
    of what continues it is trained; kept: such continuations."""

    offsets: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)

    def mean(self, node: int, values: Sequence[float]) -> float:
        """Over what continues the answer, 0 where nothing does."""
        later = self.kept[node]
        return sum(values[c] for c in later) / len(later) if later else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """An answer in a sample of this rank: its node, its sample and its trained tokens there."""

    node: int
    sample: int
    places: Tensor


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
        penalties: [R] by sample of this rank, read at active tokens only.
        values: [R] by sample, a critic's; None: 0.
        masks: [R] bool by sample, active tokens.
        gamma: 0 to 1.
        lambd: 0 to 1 by sample, the same for all samples of an episode.

    Returns:
        (advantages, returns), [R] float64 by sample each, 0 at inactive tokens and in samples of
        episodes without a record.
    """
    nodes = _nodes(tree)
    parts = _parts(tree, nodes, masks)
    values = values or [torch.zeros(mask.numel()) for mask in masks]
    own = torch.zeros(len(nodes.parents), 2, dtype=torch.float64)
    for part in parts:
        own[part.node, 0] += part.places.numel()
        own[part.node, 1] = values[part.sample][part.places[0]].double()
    counts, first = (row.tolist() for row in sum_over(own, tree.group).unbind(1))
    _prune(nodes, counts)
    after = _after(nodes, counts, first)
    ends = _end_rewards(tree, nodes)
    local = _within(parts, penalties, values, ends, after, gamma, lambd)
    own.zero_()
    for part, advantage in zip(parts, local, strict=True):
        own[part.node, 0] = advantage[0]
        own[part.node, 1] = (gamma * lambd[part.sample]) ** part.places.numel()
    starts, decays = (row.tolist() for row in sum_over(own, tree.group).unbind(1))
    for node in reversed(range(len(counts))):
        if not counts[node]:  # no token of it is trained: it passes on what follows it
            starts[node], decays[node] = ends[node], 1.0
        starts[node] += decays[node] * nodes.mean(node, starts)
    advantages = [torch.zeros(mask.numel(), dtype=torch.float64) for mask in masks]
    for part, advantage in zip(parts, local, strict=True):
        count = part.places.numel()
        left = torch.arange(count, 0, -1, dtype=torch.float64)
        carried = (gamma * lambd[part.sample]) ** left * nodes.mean(part.node, starts)
        advantages[part.sample][part.places] = advantage + carried
    returns = [
        torch.where(m, a + v.double(), 0.0) if tree.has(k) else a
        for k, (a, v, m) in enumerate(zip(advantages, values, masks, strict=True))
    ]
    return advantages, returns


def _nodes(tree: TokenTree) -> _Nodes:
    nodes = _Nodes()
    for episode in tree.episodes:
        offset = len(nodes.parents)
        nodes.offsets.append(offset)
        if episode is not None:
            nodes.parents += [-1 if p < 0 else offset + p for p in episode.parents]
    return nodes


def _parts(tree: TokenTree, nodes: _Nodes, masks: Sequence[Tensor]) -> list[_Part]:
    found = []
    for k, (i, mask) in enumerate(zip(tree.mine, masks, strict=True)):
        episode = tree.episodes[i]
        for first, count, answer in () if episode is None else episode.spans[tree.sequences[k]]:
            places = mask[first : first + count].nonzero().flatten() + first
            if places.numel():
                found.append(_Part(nodes.offsets[i] + answer, k, places))
    return found


def _prune(nodes: _Nodes, counts: Sequence[float]) -> None:
    """Fill in what is left of the trees without answers of which nothing is trained."""
    nodes.kept = [[] for _ in counts]
    nodes.alive = [False] * len(counts)
    for node in reversed(range(len(counts))):  # what continues an answer is after it
        nodes.alive[node] = counts[node] > 0 or bool(nodes.kept[node])
        if nodes.alive[node] and nodes.parents[node] >= 0:
            nodes.kept[nodes.parents[node]].append(node)


def _after(nodes: _Nodes, counts: Sequence[float], first: list[float]) -> list[float]:
    """The value of what follows each answer. first: of its first token; filled in where none of it
    is trained."""
    after = [0.0] * len(counts)
    for node in reversed(range(len(counts))):
        after[node] = nodes.mean(node, first)
        if not counts[node]:
            first[node] = after[node]
    return after


def _end_rewards(tree: TokenTree, nodes: _Nodes) -> list[float]:
    """What each answer's last token gets."""
    ends = [0.0] * len(nodes.parents)
    for offset, episode, outcome in zip(nodes.offsets, tree.episodes, tree.outcomes, strict=True):
        if episode is None:
            continue
        alive = [a for a in range(len(episode.parents)) if nodes.alive[offset + a]]
        rest = outcome - sum(episode.rewards[a] for a in alive)
        for a in alive:
            ends[offset + a] = episode.rewards[a] + (0.0 if nodes.kept[offset + a] else rest)
    return ends


def _within(
    parts: Sequence[_Part],
    penalties: Sequence[Tensor],
    values: Sequence[Tensor],
    ends: Sequence[float],
    after: Sequence[float],
    gamma: float,
    lambd: Sequence[float],
) -> list[Tensor]:
    """Advantages of the tokens of each answer, without those of what follows it."""
    rewards = []
    for part in parts:
        reward = -penalties[part.sample][part.places].double()
        reward[-1] += ends[part.node] + gamma * after[part.node]
        rewards.append(reward)
    return gae(
        rewards,
        [values[part.sample][part.places] for part in parts],
        [torch.ones(part.places.numel(), dtype=torch.bool) for part in parts],
        gamma,
        [lambd[part.sample] for part in parts],
    )[0]
