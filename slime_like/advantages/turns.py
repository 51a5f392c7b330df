"""Advantages of the turns of an agent's episode, instead of one number per episode.

grpo_turn, after MT-GRPO (arXiv 2505.11821, section 4) and the discounted returns of GTPO (arXiv
2511.14846): rewards of turns are compared within the group at the same depth, which is the number
of turns before them in their conversation:

    r~_a = (r_a - mean_d) / (std_d + 1e-6)        over the group's turns of depth d
    S_a = r~_a + gamma mean_c S_c                 over the turns c that continue a
    A_a = (R - mean) / (std + 1e-6) + S_a         the first term is GRPO's, of whole episodes

grpo_branch, after Tree-GRPO (arXiv 2509.21240): a branch is a path to a turn that nothing
continues, and gets R and the rewards of its turns. It is compared with the other branches of its
episode, and with those of the group; a turn gets the mean of its branches:

    A_b = (R_b - mean_episode) / (std_episode + 1e-6) + (R_b - mean_group) / (std_group + 1e-6)

Both are GRPO where episodes have one branch and turns no rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from slime_like.advantages.episodes import EpisodeTurns, TurnGroup
from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import TurnEstimator, register_turn_estimator
from slime_like.lazy import Tensor, torch

NO_TURNS = EpisodeTurns((), (), ((),))


@register_turn_estimator("grpo_turn")
def grpo_turn(group: TurnGroup) -> list[list[float]]:
    """A_a = A_episode + S_a of the module docstring, for every turn a of every episode."""
    episode_advantages = group.compared or _normalize(group.rewards, group)
    # r~: a turn is compared with the turns of the same depth in the whole group
    by_depth = defaultdict[int, list[tuple[int, int]]](list)
    for i, episode in enumerate(group.episodes):
        for turn, depth in enumerate(_depths(episode.parents)):
            by_depth[depth].append((i, turn))
    returns = [[0.0] * len(episode.rewards) for episode in group.episodes]
    for turns in by_depth.values():
        rewards = [group.episodes[i].rewards[turn] for i, turn in turns]
        for (i, turn), value in zip(turns, _normalize(rewards, group), strict=True):
            returns[i][turn] = value
    # S: continuations have larger indices, so from the last turn on they are complete
    for i, episode in enumerate(group.episodes):
        children = _children(episode.parents)
        for turn in reversed(range(len(children))):
            if children[turn]:
                later = sum(returns[i][child] for child in children[turn]) / len(children[turn])
                returns[i][turn] += group.gamma * later
        returns[i] = [episode_advantages[i] + value for value in returns[i]]
    return returns


@register_turn_estimator("grpo_branch", discounts=False)
def grpo_branch(group: TurnGroup) -> list[list[float]]:
    """The mean over the branches through a turn of their advantage within the episode plus that
    within the group."""
    branches = [_branches(episode) for episode in group.episodes]
    totals: list[list[float]] = [[] for _ in branches]
    for i, episode in enumerate(group.episodes):
        for branch in branches[i]:
            turn_rewards = sum(episode.rewards[turn] for turn in branch)
            totals[i].append(group.rewards[i] + turn_rewards)
    over_group = iter(_normalize(list(chain.from_iterable(totals)), group))
    advantages = []
    for i, episode in enumerate(group.episodes):
        sums = [0.0] * len(episode.rewards)
        counts = [0] * len(episode.rewards)
        for branch, in_episode in zip(branches[i], _normalize(totals[i], group), strict=True):
            in_group = next(over_group)
            for turn in branch:
                sums[turn] += in_episode + (group.compared[i] if group.compared else in_group)
                counts[turn] += 1
        advantages.append([total / count for total, count in zip(sums, counts, strict=True)])
    return advantages


def _normalize(values: Sequence[float], group: TurnGroup) -> list[float]:
    """GRPO's normalisation; exactly 0 if all values are equal."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    numbers = torch.tensor(values, dtype=torch.float64)
    centred = numbers - numbers.mean()
    if group.normalize_std:
        centred = centred / (numbers.std() + EPS)
    return list(centred.tolist())


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for turn, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(turn)
    return children


def _branches(episode: EpisodeTurns) -> list[list[int]]:
    """The turns on the path to each leaf of the tree, the leaf first."""
    branches = []
    for turn, children in enumerate(_children(episode.parents)):
        if not children:
            branch = [turn]
            while (parent := episode.parents[branch[-1]]) >= 0:
                branch.append(parent)
            branches.append(branch)
    return branches


def turn_advantages(
    entry: TurnEstimator,
    rewards: Tensor,
    group_ids: Tensor,
    turns: Sequence[EpisodeTurns | None] | None,
    *,
    is_normalized: bool,
    gamma: float,
    normalize_std: bool,
    local_indices: Sequence[int],
    sequences: Sequence[int],
    masks: Sequence[Tensor],
) -> list[Tensor]:
    """Advantages [R] float64 per sample of this rank, the same in every layout.

    Args:
        rewards: [B] float64 of all episodes, not finite for invalid ones.
        group_ids: [B].
        turns: Per episode, None for one without any; None: every episode is one turn.
        is_normalized: The rewards are normalised within groups already.
        local_indices, sequences: Per sample of this rank, its episode and its index within it.
        masks: [R] bool per sample of this rank.
    """
    if turns is None:
        lengths = {i: mask.numel() for i, mask in zip(local_indices, masks, strict=True)}
        spans = [(0, lengths.get(i, 0), 0) for i in range(rewards.numel())]
        turns = [EpisodeTurns((-1,), (0.0,), [[span]]) for span in spans]
    episodes = [NO_TURNS if episode is None else episode for episode in turns]
    advantages: list[list[float]] = [[0.0] * len(episode.rewards) for episode in episodes]
    for group_id in group_ids.unique():
        members = ((group_ids == group_id) & torch.isfinite(rewards)).nonzero().flatten().tolist()
        numbers = rewards[members].tolist()
        compared = numbers if is_normalized else None
        group = TurnGroup(numbers, [episodes[i] for i in members], compared, gamma, normalize_std)
        for i, values in zip(members, entry.fn(group), strict=True):
            advantages[i] = values
    result = []
    for i, sequence, mask in zip(local_indices, sequences, masks, strict=True):
        value = torch.zeros(mask.numel(), dtype=torch.float64)
        for first, count, turn in episodes[i].spans[sequence]:
            value[first : first + count] = advantages[i][turn]
        result.append(torch.where(mask, value, 0.0))
    return result
