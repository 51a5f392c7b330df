"""Random trees of agent episodes, split into sequences in different ways, and the expected results
of estimators that follow tokens: a loop over the tokens of the tree in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_like.advantages import EpisodeTurns, Outcomes


@dataclass(frozen=True)
class Episode:
    """An episode whose answers have tokens with penalties and values."""

    parents: list[int]  # as of `EpisodeTurns`
    rewards: list[float]  # as of `EpisodeTurns`
    penalties: list[list[float]]
    values: list[list[float]]
    outcome: float  # includes the rewards of the answers


def random_episode(generator: torch.Generator, answers: int, *, empty: bool = False) -> Episode:
    """empty: some answers have no token."""

    def draw(count: int) -> list[float]:
        found: list[float] = torch.randn(count, generator=generator, dtype=torch.float64).tolist()
        return found

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    parents = [pick(-1, a) if a else -1 for a in range(answers)]
    sizes = [pick(0 if empty else 1, 5) for _ in range(answers)]
    sizes[0] = sizes[0] or 1
    return Episode(
        parents, draw(answers), [draw(n) for n in sizes], [draw(n) for n in sizes], draw(1)[0]
    )


def expected(
    episode: Episode, gamma: float, lambd: float, *, with_values: bool
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns per answer and token, from the recursion in `tree_returns.py`."""
    children: dict[int, list[int]] = {a: [] for a in range(-1, len(episode.parents))}
    for a, parent in enumerate(episode.parents):
        children[parent].append(a)

    def counts(a: int) -> bool:
        return bool(episode.penalties[a]) or any(counts(c) for c in children[a])

    kept = {a: [c for c in later if counts(c)] for a, later in children.items()}
    alive = [a for a in range(len(episode.parents)) if counts(a)]
    rest = episode.outcome - sum(episode.rewards[a] for a in alive)
    found = [[0.0] * len(own) for own in episode.penalties]

    def value(a: int, t: int) -> float:
        if t < len(episode.values[a]):
            return episode.values[a][t] if with_values else 0.0
        later = [value(c, 0) for c in kept[a]]
        return sum(later) / len(later) if later else 0.0

    def end(a: int) -> float:
        return episode.rewards[a] + (0.0 if kept[a] else rest)

    def advantage(a: int, t: int) -> float:
        if t == len(episode.values[a]):  # after its last token
            later = [advantage(c, 0) + (0.0 if episode.values[c] else end(c)) for c in kept[a]]
            return sum(later) / len(later) if later else 0.0
        reward = -episode.penalties[a][t] + (end(a) if t == len(episode.values[a]) - 1 else 0.0)
        delta = reward + gamma * value(a, t + 1) - value(a, t)
        found[a][t] = delta + gamma * lambd * advantage(a, t + 1)
        return found[a][t]

    for root in kept[-1]:
        advantage(root, 0)
    returns = [[x + value(a, t) for t, x in enumerate(own)] for a, own in enumerate(found)]
    return found, returns


Cut = Sequence[Sequence[int]]  # the answers of each sequence


def cuts(episode: Episode, generator: torch.Generator) -> dict[str, Cut]:
    """Each answer by itself; paths; and paths that are cut at random places."""
    turns = [[a] for a, own in enumerate(episode.penalties) if own]
    paths: list[list[int]] = []
    taken: set[int] = set()
    for a in range(len(episode.parents)):
        if a not in episode.parents:
            path = []
            while a >= 0 and a not in taken:
                path.append(a)
                a = episode.parents[a]
            taken.update(path)
            paths.append([a for a in reversed(path) if episode.penalties[a]])
    pieces: list[list[int]] = []
    for path in filter(None, paths):
        pieces.append([])
        for a in path:
            if pieces[-1] and torch.rand((), generator=generator) < 0.5:
                pieces.append([])
            pieces[-1].append(a)
    return {"turns": turns, "paths": [p for p in paths if p], "pieces": pieces}


@dataclass(frozen=True)
class Laid:
    """The arguments of `estimate_advantages`;"""

    outcomes: Outcomes
    local_indices: list[int]
    sequences: list[int]
    masks: list[torch.Tensor]
    penalties: list[torch.Tensor]
    values: list[torch.Tensor]
    answers: list[Sequence[int]]  # of each sequence


def laid(episodes: Sequence[Episode], cut: Sequence[Cut]) -> Laid:
    """Two tokens that are not trained on come before each answer but the first of a sequence."""
    local, places, masks, penalties, values, answers, records = [], [], [], [], [], [], []
    for i, (episode, own) in enumerate(zip(episodes, cut, strict=True)):
        spans = []
        for place, sequence in enumerate(own):
            mask: list[bool] = []
            kl: list[float] = []
            of_tokens: list[float] = []
            spans.append([])
            for a in sequence:
                if mask:
                    mask += [False] * 2
                    kl += [0.0] * 2
                    of_tokens += [float("nan")] * 2
                spans[-1].append((len(mask), len(episode.penalties[a]), a))
                mask += [True] * len(episode.penalties[a])
                kl += episode.penalties[a]
                of_tokens += episode.values[a]
            local.append(i)
            places.append(place)
            masks.append(torch.tensor(mask))
            penalties.append(torch.tensor(kl, dtype=torch.float64))
            values.append(torch.tensor(of_tokens, dtype=torch.float64))
            answers.append(sequence)
        records.append(EpisodeTurns(episode.parents, episode.rewards, spans))
    batch = Outcomes(
        torch.tensor([e.outcome for e in episodes], dtype=torch.float64),
        torch.zeros(len(episodes), dtype=torch.int64),
        torch.tensor([sum(map(len, e.penalties)) for e in episodes]),
        turns=records,
    )
    return Laid(batch, local, places, masks, penalties, values, answers)
