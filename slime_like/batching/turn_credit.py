"""Inputs of advantage estimators from agent episodes: assistant turns with their rewards, and
length penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from arguments.schema import AlgorithmConfig
from slime_like.advantages import EpisodeTurns, advantage_estimators, follows_tokens, needs_critic
from slime_like.distributed.collectives import gather
from slime_like.samples.episodes import episodes_of
from slime_like.samples.index import AnySample
from slime_like.types import Sample

if TYPE_CHECKING:
    from slime_like.batching.outcome_fields import OutcomeFields

# keys of a sample's metadata
NUMBERS = "agent"
TURNS = "agent_answers"
EARLIER_TURNS = "answers"  # of older recordings and checkpoints; also SQuAD's key for labels
SUMMED = "summed"  # flag in TURNS: the episode's reward includes the rewards of its turns


def credit_fields(
    samples: Sequence[AnySample],
    *,
    by_turn: bool,
    turn_penalty: float,
    token_penalty: float,
) -> OutcomeFields:
    """Agent-specific fields of `Outcomes`. Collective.

    Args:
        samples: The first sequence of each episode, on the rank that generated it.
        by_turn: Every episode needs its turns: the estimator credits them separately from the
            episode. Others see the episode's reward with the turn rewards included.
        turn_penalty, token_penalty: Penalty per turn and per token.

    Raises:
        ValueError: On all ranks, with `by_turn`, for an episode that has no record of its turns.
    """
    local = {
        i: (record_of(s), s.metadata.get(NUMBERS))
        for i, s in enumerate(samples)
        if isinstance(s, Sample)
    }
    local = {i: pair for i, pair in local.items() if pair != (None, None)}
    by_index: dict[int, tuple[Mapping[str, Any] | None, object]] = {}
    for rank_records in gather(local):
        by_index |= rank_records
    ordered = [by_index.get(i, (None, None)) for i in range(len(samples))]
    fields: OutcomeFields = {}
    turns = [_turns(record) for record, _ in ordered]
    if by_turn:
        _check_records(turns, samples)
    if by_turn or any(turns):
        fields["turns"] = turns
    costs = [_cost(numbers, turn_penalty, token_penalty) for _, numbers in ordered]
    for i, (record, _) in enumerate(ordered):
        # recorded for the other kind of estimator
        if record is not None and bool(record[SUMMED]) == by_turn:
            costs[i] += sum(record["rewards"]) if by_turn else -sum(record["rewards"])
    if any(costs):
        fields["penalties"] = torch.tensor(costs, dtype=torch.float64)
    return fields


def keep_record(converted: Sequence[Sample], before: Sequence[Sample]) -> list[Sample]:
    """The sequences of an episode after a user function, with the record of its turns only if the
    tokens are those before it: the record has places in the responses."""
    if len(converted) == len(before) and all(map(_same_tokens, converted, before)):
        return list(converted)
    sequences = []
    for sample in converted:
        record = record_of(sample)
        metadata = {k: v for k, v in sample.metadata.items() if record is None or v is not record}
        sequences.append(replace(sample, metadata=metadata))
    return sequences


def _same_tokens(sample: Sample, other: Sample) -> bool:
    same_length = sample.response_length == other.response_length
    return same_length and torch.equal(sample.tokens, other.tokens)


def record_of(sample: Sample) -> Mapping[str, Any] | None:
    """The record of an agent's turns, if there is one; a row may have something else under its
    keys."""
    for key in (TURNS, EARLIER_TURNS):
        record = sample.metadata.get(key)
        if isinstance(record, Mapping) and SUMMED in record:
            return record
    return None


def _turns(record: Mapping[str, Any] | None) -> EpisodeTurns | None:
    """The recorded turns; None without a record or if the episode failed before its first turn."""
    if record is None or not record["spans"]:
        return None
    spans: list[list[tuple[int, int, int]]] = []
    for branch in record["spans"]:
        spans.append([(int(start), int(length), int(turn)) for start, length, turn in branch])
    return EpisodeTurns(record["parents"], record["rewards"], spans)


def _check_records(turns: Sequence[EpisodeTurns | None], samples: Sequence[AnySample]) -> None:
    for record, sample in zip(turns, samples, strict=True):
        if record is None and sample.active_tokens > 0:
            raise ValueError(
                f"sample {sample.sample_id} does not record its turns, which a per-turn "
                "--advantage-estimator needs; it was recorded without one, or not by an agent, or "
                "its tokens were changed by --custom-convert-samples-to-train-data-path or "
                "--rollout-sample-hook-path"
            )


def _cost(numbers: object, turn: float, token: float) -> float:
    if not isinstance(numbers, Mapping):
        return 0.0
    return float(turn * numbers["answers"] + token * numbers["written_tokens"])


def tree_reasons(algorithm: AlgorithmConfig) -> list[str]:
    """Flags that make a token's return depend on later tokens; empty if none does."""
    entry = advantage_estimators.get(algorithm.advantage_estimator)
    reasons = {
        "a critic": needs_critic(entry),
        "--gamma": algorithm.gamma != 1,
        "--kl-coef": algorithm.kl_coef != 0,
    }
    return [reason for reason, holds in reasons.items() if holds and follows_tokens(entry)]


def check_trees(
    algorithm: AlgorithmConfig,
    turns: Sequence[EpisodeTurns | None] | None,
    samples: Sequence[AnySample],
) -> None:
    """Check that returns do not depend on how an episode was split into sequences.

    Args:
        turns: The turns of each episode, from `credit_fields`.
        samples: All sequences of a rollout.

    Raises:
        ValueError: Names the flags, if returns depend on later tokens and an episode of several
            sequences does not record which sequence continues which.
    """
    name = algorithm.advantage_estimator
    reasons = tree_reasons(algorithm)
    if not reasons:
        return
    episodes = episodes_of(samples)
    counts = Counter(episodes.of)
    for i, place in enumerate(episodes.first):
        if counts[i] > 1 and (turns is None or turns[i] is None):
            raise ValueError(
                f"--advantage-estimator {name} with {' and '.join(reasons)}: the returns of sample "
                f"{samples[place].sample_id} depend on which of its {counts[i]} sequences "
                "continues which, and it has no record of this; agents keep one, a list from a "
                "generate function or changed tokens have none: return one sample, or remove "
                "these flags"
            )
