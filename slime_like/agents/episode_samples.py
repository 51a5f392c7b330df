"""Convert agent episodes to samples, and compute the metrics of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from slime_like.agents.messages import for_record
from slime_like.agents.sessions import Session
from slime_like.agents.task import Task
from slime_like.agents.tree import Branch, SessionTree
from slime_like.batching.turn_credit import NUMBERS, SUMMED, record_of
from slime_like.distributed.collectives import gather
from slime_like.rewards.limit import beyond_limit
from slime_like.rollout.episode import mark_aborted
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.types import Sample, SampleStatus

MESSAGES = "messages"  # metadata key of the main conversation
RETURN_MEAN = "agent/return_mean"
RETURN_STD = "agent/return_std"


def bad_reward(reward: object, limit: float) -> str | None:
    """Why an agent's reward is invalid, or None. limit: --max-abs-reward."""
    if reward is None or (isinstance(reward, int | float) and not isinstance(reward, bool)):
        return beyond_limit(reward, limit)
    return f"the agent returned {type(reward).__name__}; return its reward, a number, or None"


def sample_of(
    sample: Sample,
    task: Task,
    session: Session,
    branches: Sequence[Branch],
    reward: float | None,
    reason: str | None,
) -> Sample:
    """Convert an episode to a sample.

    Args:
        branches: Of its tree.
        reason: Why it is not trained on; None on success.
    """
    numbers = session.numbers() | {"branches": float(len(branches))}
    masked = sum(b.loss_mask.count(False) for b in branches)
    num_generated = sum(len(turn.tokens) for turn in session.tree.turns)
    numbers |= {"masked_tokens": float(masked), "written_tokens": float(num_generated)}
    numbers["answer_rewards"] = sum(turn.reward for turn in session.tree.turns)
    numbers["lost"] = float(reason is not None)
    sample = replace(sample, metadata={**task.metadata, NUMBERS: numbers})
    # nothing is trained on: the images are the row's, and not always those of the tokens (see
    # `live_episodes.reset_episode`)
    lost = replace(sample, images=(), status=SampleStatus.ABORTED)
    if session.aborted:
        return lost
    if reason is None and not branches:
        reason = "the agent asked for no answer"
    if reason is not None:
        return mark_aborted(lost, reason)
    main = session.tree.turns[0]
    while follows := [turn for turn in session.tree.turns if turn.parent is main]:
        main = follows[0]
    conversation = [for_record(message) for message in (*main.messages, main.answer)]
    metadata = {**sample.metadata, MESSAGES: conversation}
    first, *others = (sequence(sample, branch, session) for branch in branches)
    if reward is not None:
        reward = float(reward) if math.isfinite(reward) else math.nan
    return replace(first, metadata=metadata, reward=reward, branches=tuple(others))


def answers_of(tree: SessionTree, branches: Sequence[Branch], *, summed: bool) -> dict[str, object]:
    """Metadata for `batching/turn_credit.py`, as plain JSON. summed: the rewards of turns are
    added to the episode's reward."""
    return {
        SUMMED: summed,
        "parents": [-1 if turn.parent is None else turn.parent.number for turn in tree.turns],
        "rewards": [turn.reward for turn in tree.turns],
        "spans": [list(map(list, branch.spans)) for branch in branches],
    }


def sequence(sample: Sample, branch: Branch, session: Session) -> Sample:
    """Convert a branch to a sample."""
    response = branch.tokens[branch.prompt_length :]
    return replace(
        sample,
        tokens=torch.tensor(branch.tokens, dtype=torch.int64),
        response_length=len(response),
        loss_mask=torch.tensor(branch.loss_mask, dtype=torch.bool),
        rollout_log_probs=torch.tensor(branch.log_probs, dtype=torch.float32),
        weight_versions=branch.weight_versions,
        sampling_mask=branch.sampling_mask,
        routed_experts=branch.routed_experts,
        indexer_topk=branch.indexer_topk,
        status=SampleStatus.TRUNCATED if branch.truncated else SampleStatus.COMPLETED,
        response=session.text_of(response, stopped=not branch.truncated),
        images=branch.images,
    )


def agent_metrics(
    groups: Sequence[SampleGroup], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Means over the episodes of a rollout. Collective.

    Args:
        groups: Each sample is complete on the rank that generated it.
        group: Process group of all ranks, if the default group is in use at the same time.
    """
    samples = [s for s in flatten(groups) if isinstance(s, Sample)]
    numbers = [s.metadata.get(NUMBERS) for s in samples]
    local: list[Mapping[str, float]] = [n for n in numbers if isinstance(n, Mapping)]
    records = list(chain.from_iterable(gather(local, group)))
    metrics: dict[str, float] = {}
    for name in records[0] if records else ():
        metrics[f"agent/{name}"] = sum(record[name] for record in records) / len(records)
    returns = list(chain.from_iterable(gather(_returns(samples), group)))
    if any(value != reward for value, reward in returns):
        values = torch.tensor([value for value, _ in returns], dtype=torch.float64)
        metrics[RETURN_MEAN] = float(values.mean())
        metrics[RETURN_STD] = float(values.std(correction=0))
    return metrics


def _returns(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """The episodes' rewards with those of their turns, and without, where an estimator credits the
    turns separately."""
    returns = []
    for sample in samples:
        if sample.reward is None or not math.isfinite(sample.reward):
            continue
        record = record_of(sample)
        of_turns = 0.0
        if record is not None and not record[SUMMED]:
            of_turns = sum(record["rewards"])
        returns.append((sample.reward + of_turns, sample.reward))
    return returns
