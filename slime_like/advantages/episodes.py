"""An agent's episode as advantage estimators see it: its turns, and what continues what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.lazy import dist


@dataclass(frozen=True, slots=True)
class EpisodeTurns:
    """The turns of an agent's episode."""

    parents: Sequence[int]  # the turn that each turn continues, -1 for none
    rewards: Sequence[float]  # of each turn
    # per sequence, of each trained turn: (first token in the response, number of tokens, turn)
    spans: Sequence[Sequence[tuple[int, int, int]]]


@dataclass(frozen=True, slots=True)
class TurnGroup:
    """The valid episodes of one prompt."""

    rewards: Sequence[float]  # of each episode, without turn rewards
    episodes: Sequence[EpisodeTurns]
    compared: Sequence[float] | None  # post-processed by a user function; None: to be normalised
    gamma: float
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The turns of a rollout's episodes, for the samples of this rank."""

    episodes: Sequence[EpisodeTurns | None]  # of all ranks; None: without a record of its turns
    outcomes: Sequence[float]  # reward of each episode, including those of its turns
    lengths: Sequence[int]  # trained tokens of each episode
    local_indices: Sequence[int]  # the episode of each sample of this rank
    sequences: Sequence[int]  # its index among the sequences of the episode
    group: dist.ProcessGroup | None = None  # data-parallel ranks, which share the trees

    def has(self, k: int) -> bool:
        """Whether the k-th sample of this rank is of an episode with a record."""
        return self.episodes[self.local_indices[k]] is not None
