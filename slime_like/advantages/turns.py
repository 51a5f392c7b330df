"""Credit for each answer of an agent's episode, in place of one number for all of it.

grpo_turn, after MT-GRPO (arXiv 2505.11821, section 4) and the discounted returns of GTPO (arXiv
2511.14846): rewards of answers are compared within the group at the same depth, which is the number
of answers before them in their conversation:

    r~_a = (r_a - mean_d) / (std_d + 1e-6)        over the group's answers of depth d
    S_a = r~_a + gamma mean_c S_c                 over the answers c that continue a
    A_a = (R - mean) / (std + 1e-6) + S_a         the first term is GRPO's, of whole episodes

grpo_branch, after Tree-GRPO (arXiv 2509.21240): a branch is a path to an answer that nothing
continues, and gets R and the rewards of its answers. It is compared with the other branches of its
episode, and with those of the group; an answer gets the mean of its branches:

    A_b = (R_b - mean_episode) / (std_episode + 1e-6) + (R_b - mean_group) / (std_group + 1e-6)

Both are GRPO where episodes have one branch and answers no rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slime_like.advantages.grpo import EPS
from slime_like.advantages.registry import (
    AnswerGroup,
    EpisodeAnswers,
    TurnEstimator,
    register_turn_estimator,
)
from slime_like.lazy import Tensor, torch

NO_ANSWERS = EpisodeAnswers((), (), ((),))


@register_turn_estimator("grpo_turn")
def grpo_turn(group: AnswerGroup) -> list[list[float]]:
    whole = group.compared or _relative(group.rewards, group)
    places = defaultdict[int, list[tuple[int, int]]](list)
    for i, episode in enumerate(group.episodes):
        for a, depth in enumerate(_depths(episode.parents)):
            places[depth].append((i, a))
    sums = [[0.0] * len(episode.rewards) for episode in group.episodes]
    for of_depth in places.values():
        found = _relative([group.episodes[i].rewards[a] for i, a in of_depth], group)
        for (i, a), value in zip(of_depth, found, strict=True):
            sums[i][a] = value
    for i, episode in enumerate(group.episodes):
        children = _children(episode.parents)
        for a in reversed(range(len(episode.parents))):  # what continues an answer is after it
            if children[a]:
                later = sum(sums[i][c] for c in children[a]) / len(children[a])
                sums[i][a] += group.gamma * later
    return [[number + s for s in own] for number, own in zip(whole, sums, strict=True)]


@register_turn_estimator("grpo_branch")
def grpo_branch(group: AnswerGroup) -> list[list[float]]:
    branches = [_branches(episode) for episode in group.episodes]
    totals = [
        [reward + sum(episode.rewards[a] for a in path) for path in paths]
        for reward, episode, paths in zip(group.rewards, group.episodes, branches, strict=True)
    ]
    across = iter(_relative([total for own in totals for total in own], group))
    found = []
    for i, (episode, paths) in enumerate(zip(group.episodes, branches, strict=True)):
        within = _relative(totals[i], group)
        sums, counts = [0.0] * len(episode.rewards), [0] * len(episode.rewards)
        for path, inside in zip(paths, within, strict=True):
            outside = next(across)
            for a in path:
                sums[a] += inside + (group.compared[i] if group.compared else outside)
                counts[a] += 1
        found.append([total / count for total, count in zip(sums, counts, strict=True)])
    return found


def _relative(values: Sequence[float], group: AnswerGroup) -> list[float]:
    """GRPO's comparison; 0 exactly where all are equal."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    numbers = torch.tensor(values, dtype=torch.float64)
    centred = numbers - numbers.mean()
    found: list[float] = (
        centred / (numbers.std() + EPS) if group.normalize_std else centred
    ).tolist()
    return found


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _children(parents: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in parents]
    for a, parent in enumerate(parents):
        if parent >= 0:
            found[parent].append(a)
    return found


def _branches(episode: EpisodeAnswers) -> list[list[int]]:
    """The answers of each path to an end of the tree."""
    found = []
    for a, children in enumerate(_children(episode.parents)):
        if not children:
            path = [a]
            while (parent := episode.parents[path[-1]]) >= 0:
                path.append(parent)
            found.append(path)
    return found


def credits_of_tokens(
    entry: TurnEstimator,
    rewards: Tensor,
    group_ids: Tensor,
    answers: Sequence[EpisodeAnswers | None] | None,
    *,
    compared: bool,
    gamma: float,
    normalize_std: bool,
    mine: Sequence[int],
    sequences: Sequence[int] | None,
    masks: Sequence[Tensor],
) -> list[Tensor]:
    """Advantages [R] float64 by sample of this rank, the same in every layout.

    Args:
        entry: The estimator.
        rewards: [B] float64 of all episodes, not finite where one cannot be used.
        group_ids: [B].
        answers: Theirs, None for an episode without any; None: of each one, which is all of its
            one sequence.
        compared: The rewards are compared already.
        mine, sequences: By sample of this rank, its episode and its place among the sequences of
            that; None: the first.
        masks: [R] bool by sample of this rank.
    """
    if answers is None:
        lone = {i: masks[k].numel() for k, i in enumerate(mine)}
        spans = [((((0, lone.get(i, 0), 0)),),) for i in range(rewards.numel())]
        answers = [EpisodeAnswers((-1,), (0.0,), of_one) for of_one in spans]
    episodes = [NO_ANSWERS if own is None else own for own in answers]
    credits: list[list[float]] = [[0.0] * len(episode.rewards) for episode in episodes]
    for group_id in group_ids.unique():
        members = ((group_ids == group_id) & torch.isfinite(rewards)).nonzero().flatten().tolist()
        numbers = rewards[members].tolist()
        own = [episodes[i] for i in members]
        group = AnswerGroup(numbers, own, numbers if compared else None, gamma, normalize_std)
        for i, found in zip(members, entry.fn(group), strict=True):
            credits[i] = found
    values = []
    for k, (i, mask) in enumerate(zip(mine, masks, strict=True)):
        value = torch.zeros(mask.numel(), dtype=torch.float64)
        for first, count, answer in episodes[i].spans[0 if sequences is None else sequences[k]]:
            value[first : first + count] = credits[i][answer]
        values.append(torch.where(mask, value, 0.0))
    return values
