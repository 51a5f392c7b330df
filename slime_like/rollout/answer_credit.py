"""What estimators of advantages read of agents' episodes: the answers with their rewards, and what an
episode pays for its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_like.advantages import EpisodeAnswers
from slime_like.distributed.collectives import gather
from slime_like.sample_index import AnySample
from slime_like.types import Sample

NUMBERS, ANSWERS = "agent", "answers"  # keys of a sample's metadata


def credit_fields(
    samples: Sequence[AnySample], *, by_turn: bool, turn_penalty: float, token_penalty: float
) -> dict[str, Any]:
    """Fields of `Outcomes`; a collective.

    Args:
        samples: The first sequence of each episode, on the rank that made it.
        by_turn: With the answers of each.
        turn_penalty, token_penalty: What an answer and a token cost.

    Raises:
        ValueError: on all ranks, for an episode without a record of its answers.
    """
    own = {
        i: (s.metadata.get(ANSWERS) if by_turn else None, s.metadata.get(NUMBERS))
        for i, s in enumerate(samples)
        if isinstance(s, Sample)
    }
    found = {i: value for rank in gather(own) for i, value in rank.items()}
    ordered = [found[i] for i in range(len(samples))]
    fields: dict[str, Any] = {}
    if by_turn:
        fields["answers"] = [
            _answers(given, sample.sample_id, trained=sample.active_tokens > 0)
            for (given, _), sample in zip(ordered, samples, strict=True)
        ]
    if turn_penalty or token_penalty:
        costs = [_cost(numbers, turn_penalty, token_penalty) for _, numbers in ordered]
        fields["penalties"] = torch.tensor(costs, dtype=torch.float64)
    return fields


def _answers(given: object, sample_id: int, *, trained: bool) -> EpisodeAnswers:
    if isinstance(given, Mapping):
        spans = [[(int(a), int(b), int(c)) for a, b, c in own] for own in given["spans"]]
        return EpisodeAnswers(given["parents"], given["rewards"], spans)
    if trained:
        raise ValueError(
            f"sample {sample_id} has no record of which tokens are which answer, as an "
            "--advantage-estimator by turn needs; it was recorded without one, or by no agent"
        )
    return EpisodeAnswers((), (), ((),))


def _cost(numbers: object, turn: float, token: float) -> float:
    if not isinstance(numbers, Mapping):
        return 0.0
    return float(turn * numbers["answers"] + token * numbers["written_tokens"])
