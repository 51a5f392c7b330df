"""Inputs of the advantage estimators, over all ranks: rewards and lengths of every episode, rewards
post-processed by a user function, and reward components."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from slime_like.advantages import Outcomes, RewardParts
from slime_like.batching.outcome_fields import OutcomeFields
from slime_like.distributed.collectives import from_rank_zero, gather, together
from slime_like.lazy import Tensor, torch
from slime_like.rewards.limit import require_within
from slime_like.samples.episodes import complete, episodes_of
from slime_like.samples.index import AnySample
from slime_like.types import REWARD_DETAILS, TRAIN_REWARD, Sample


def check_rewards(samples: Sequence[AnySample], limit: float) -> None:
    """Raise ValueError on all ranks for a sample with a reward beyond the limit. Collective.

    The last check before training: of functions, files, agents and recordings alike.

    Args:
        samples: Of the rollout, each complete on the rank that generated it.
        limit: --max-abs-reward.
    """

    def check() -> None:
        for sample in samples:
            place = f"sample {sample.sample_id}"
            require_within(sample.reward, limit, place)
            if isinstance(sample, Sample) and sample.token_rewards is not None:
                for value in sample.token_rewards.tolist():
                    require_within(value, limit, f"{place}, a token of it")

    together(check)


def within(read: OutcomeReader, limit: float, samples: Sequence[AnySample]) -> OutcomeFields:
    """The fields of a reader, which are equal on all ranks. Raises ValueError for a reward beyond
    the limit."""
    fields = read(samples)
    for sample, values in zip(samples, _rewards_in(fields, len(samples)), strict=True):
        for value in values:
            require_within(value, limit, f"sample {sample.sample_id}")
    return fields


def _rewards_in(fields: OutcomeFields, count: int) -> list[list[float]]:
    """The rewards in these fields, by sample."""
    rewards: list[list[float]] = [[] for _ in range(count)]
    if "processed" in fields:
        for row, value in zip(rewards, fields["processed"].tolist(), strict=True):
            row.append(value)
    if "parts" in fields:
        for row, values in zip(rewards, fields["parts"].values.tolist(), strict=True):
            row += values
    for row, turns in zip(rewards, fields.get("turns", ())):
        row += [] if turns is None else turns.rewards
    return rewards


# samples of a rollout -> fields; a collective, which raises ValueError on all ranks
OutcomeReader = Callable[[Sequence[AnySample]], OutcomeFields]


def train_rewards(samples: Sequence[AnySample]) -> Tensor:
    """Rewards set by --custom-convert-samples-to-train-data-path, [B] float64 on all ranks.
    Collective. samples: complete on rank 0, which converted them."""
    rewards = from_rank_zero(lambda: [s.metadata[TRAIN_REWARD] for s in complete(samples)])
    return torch.tensor(rewards, dtype=torch.float64)


def reward_parts(
    keys: Sequence[str],
    weights: Sequence[float],
    reward_key: str | None,
    samples: Sequence[AnySample],
) -> RewardParts:
    """Reward components for gdpo. Collective.

    Args:
        keys: Keys of the reward function's dict; `reward_key` is the reward itself.
        weights: One per key.
        samples: Of the rollout, each complete on the rank that generated it.

    Returns:
        The components, equal on all ranks; NaN if a sample lacks a key.

    Raises:
        ValueError: On all ranks, for a key without a finite number in any sample.
    """
    local: dict[int, list[float]] = {}
    for i, sample in enumerate(samples):
        if isinstance(sample, Sample):
            local[i] = [_part(sample, key, reward_key) for key in keys]
    by_index: dict[int, list[float]] = {}
    for rank_rows in gather(local):
        by_index |= rank_rows
    rows = [by_index[i] for i in range(len(samples))]
    values = torch.tensor(rows, dtype=torch.float64).view(len(samples), len(keys))
    has_finite = torch.isfinite(values).any(0).tolist()
    missing = [key for key, is_finite in zip(keys, has_finite) if not is_finite]
    if missing:
        raise ValueError(
            "--gdpo-reward-keys: no sample of this rollout has a finite number under "
            f"{', '.join(missing)}; check what the reward function returns"
        )
    return RewardParts(values, tuple(weights))


def _part(sample: Sample, key: str, reward_key: str | None) -> float:
    if key == reward_key:
        return math.nan if sample.reward is None else sample.reward
    details = sample.metadata.get(REWARD_DETAILS)
    value = details.get(key) if isinstance(details, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def outcomes_of(samples: Sequence[AnySample]) -> Outcomes:
    """Inputs of advantage estimators for all episodes of a rollout; a missing reward is NaN. Greedy
    rewards are set if every sample has one. Token rewards: of this rank's samples only."""
    episodes = episodes_of(samples)
    lengths = episodes.sums([s.active_tokens for s in samples])
    samples = [samples[i] for i in episodes.first]
    rewards = [math.nan if s.reward is None else s.reward for s in samples]
    greedy = [s.greedy_reward for s in samples]
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor([s.group_id for s in samples]),
        lengths=lengths,
        greedy_rewards=None if None in greedy else torch.tensor(greedy, dtype=torch.float64),
        token_rewards=[s.token_rewards if isinstance(s, Sample) else None for s in samples],
        some_have_token_rewards=any(s.has("token_rewards") for s in samples),
    )
