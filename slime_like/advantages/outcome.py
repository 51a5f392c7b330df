"""Outcome estimators: one advantage per sample, from the rewards of its group. Handles non-finite
rewards and groups of one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from slime_like.advantages.registry import (
    GroupRewards,
    OutcomeEstimator,
    RewardParts,
    advantage_estimators,
)
from slime_like.lazy import Tensor, torch
from slime_like.validation import require_choice, require_ids, require_shape, require_tensor

Singleton = Literal["zero", "reward"]
SINGLETONS: tuple[str, ...] = get_args(Singleton)


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """Result of an outcome estimator."""

    values: Tensor  # [B] float32, one per sample, for all its active tokens
    metrics: Mapping[str, float]  # plain numbers by name


def compute_advantages(
    estimator: str,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    normalize_std: bool = True,
    singleton: Singleton = "zero",
    parts: RewardParts | None = None,
) -> AdvantageOutput:
    """Compute advantages of all samples of a rollout with an outcome estimator.

    A sample without a finite reward is excluded from the statistics and gets 0. A group of one gets
    0, with a warning, unless `singleton` is "reward".

    Args:
        estimator: A registered name, e.g. "grpo".
        rewards: [B], after any KL penalty; not finite for samples without a valid reward.
        group_ids: [B] integers, the prompt; groups may have any size.
        lengths: [B] integers >= 0, active tokens.
        normalize_std: False: Dr. GRPO.
        singleton: "zero" or "reward".
        parts: Reward components, normalised separately (gdpo); None: only the reward.

    Returns:
        Advantages [B] and metrics.

    Raises:
        ValueError: An unknown estimator or `singleton`, a per-token estimator, a wrong shape, or no
            finite reward.
    """
    _check_samples(rewards, group_ids, lengths, singleton)
    entry = advantage_estimators.get(estimator)
    if not isinstance(entry, OutcomeEstimator):
        raise ValueError(
            f"{estimator} gives each token its own advantage; "
            "see slime_like.advantages.estimate_advantages"
        )
    return outcome_advantages(
        entry,
        rewards=rewards,
        group_ids=group_ids,
        lengths=lengths,
        normalize_std=normalize_std,
        singleton=singleton,
        parts=parts,
    )


def outcome_advantages(
    entry: OutcomeEstimator,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    normalize_std: bool,
    singleton: Singleton,
    parts: RewardParts | None,
) -> AdvantageOutput:
    """See `compute_advantages`."""
    if entry.combine is not None:
        return _combine_parts(entry, rewards, group_ids, lengths, parts, normalize_std, singleton)
    if parts is not None:
        raise ValueError(f"{entry.name} takes one reward per response, not reward components")
    if entry.over_batch:
        group_ids = torch.zeros_like(group_ids)
    output = apply_to_groups(
        entry.fn, rewards, group_ids, lengths, normalize_std=normalize_std, singleton=singleton
    )
    values = output.values
    if entry.batch_factor is not None:
        factor = entry.batch_factor(rewards.numel(), int(output.differing.sum()))
        values = torch.where(output.differing, values * factor, values)
    return AdvantageOutput(values.float(), output.metrics)


def _check_samples(rewards: Tensor, group_ids: Tensor, lengths: Tensor, singleton: str) -> None:
    require_choice("singleton", singleton, SINGLETONS)
    if require_tensor("rewards", rewards).dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [B]")
    require_ids("group_ids", group_ids, rewards.numel())
    require_shape("lengths", lengths, rewards, "rewards")
    if (~(lengths >= 0)).any():
        raise ValueError(f"lengths holds {lengths.min().item():g}; it must be >= 0")


@dataclass(frozen=True, slots=True)
class GroupOutput:
    """Values of the samples of all groups."""

    values: Tensor  # [B] float64
    differing: Tensor  # [B] bool, finite rewards of groups with different rewards
    metrics: Mapping[str, float]


def apply_to_groups(
    fn: Callable[[GroupRewards], Tensor],
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    *,
    normalize_std: bool = True,
    singleton: Singleton = "zero",
) -> GroupOutput:
    """Apply `fn` to each group; arguments and errors as of `compute_advantages`."""
    rewards = rewards.double()
    finite = finite_rewards(rewards)
    values, differing = _group_values(fn, rewards, finite, group_ids, lengths, normalize_std)
    return _handle_singletons(values, differing, rewards, finite, group_ids, singleton)


def group_metrics(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Mapping[str, float]:
    """Metrics of the groups, for estimators that compare samples by themselves."""
    return apply_to_groups(lambda group: group.rewards, rewards, group_ids, lengths).metrics


def _combine_parts(
    entry: OutcomeEstimator,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    parts: RewardParts | None,
    normalize_std: bool,
    singleton: Singleton,
) -> AdvantageOutput:
    """Normalise each reward component within groups separately. A missing component is excluded
    from its statistics and adds 0; a sample without a finite reward is excluded from all."""
    assert entry.combine is not None
    rewards = rewards.double()
    valid = finite_rewards(rewards)
    parts = parts or RewardParts(rewards[:, None], (1.0,))
    if parts.values.shape[0] != rewards.numel():
        shape = tuple(parts.values.shape)
        raise ValueError(f"reward parts have shape {shape} for {rewards.numel()} rewards")
    total = torch.zeros_like(rewards)
    differing = torch.zeros_like(valid)
    for part, weight in zip(parts.values.double().unbind(1), parts.weights):
        present = valid & torch.isfinite(part)
        values, differ = _group_values(entry.fn, part, present, group_ids, lengths, normalize_std)
        total = total + weight * values
        differing = differing | differ
    values = torch.where(differing, entry.combine(total, valid), 0.0)
    output = _handle_singletons(values, differing, rewards, valid, group_ids, singleton)
    return AdvantageOutput(output.values.float(), output.metrics)


def _group_values(
    fn: Callable[[GroupRewards], Tensor],
    rewards: Tensor,
    finite: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    normalize_std: bool,
) -> tuple[Tensor, Tensor]:
    """(values [B] float64, differing [B] bool). Groups of equal rewards get exactly 0 without
    calling `fn`, because the mean of equal numbers may round away from them."""
    values = torch.zeros_like(rewards)
    differing = torch.zeros_like(finite)
    for group_id in group_ids.unique():
        members = ((group_ids == group_id) & finite).nonzero().squeeze(1)
        group = GroupRewards(rewards[members], lengths[members].double(), normalize_std)
        if members.numel() >= 2 and not (group.rewards == group.rewards[0]).all():
            values[members] = fn(group)
            differing[members] = True
    return values, differing


def _handle_singletons(
    values: Tensor,
    differing: Tensor,
    rewards: Tensor,
    finite: Tensor,
    group_ids: Tensor,
    singleton: Singleton,
) -> GroupOutput:
    """Set the values of groups with one finite reward, and add the metrics."""
    _, group_index = group_ids.unique(return_inverse=True)
    num_groups = int(group_index.max()) + 1
    finite_count = torch.bincount(group_index[finite], minlength=num_groups)
    differing_count = torch.bincount(group_index[differing], minlength=num_groups)
    num_singletons = int((finite_count == 1).sum())
    if singleton == "reward":
        values = torch.where(finite & (finite_count == 1)[group_index], rewards, values)
    elif num_singletons:
        warnings.warn(
            "a group with a single usable sample has advantage 0 (--singleton-advantage)",
            stacklevel=_stacklevel(),
        )
    equal_groups = int(((finite_count > 1) & (differing_count == 0)).sum())
    metrics = {
        "reward/nonfinite": float((~finite).sum()),
        "reward/zero_spread_group_frac": equal_groups / num_groups,
        "reward/singleton_groups": float(num_singletons),
    }
    return GroupOutput(values, differing, metrics)


def _stacklevel() -> int:
    """The level of the caller of this package, for a warning of the calling function."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("slime_like.advantages."):
        frame = frame.f_back
        level = level + 1
    return level


def finite_rewards(rewards: Tensor) -> Tensor:
    """[B] bool. Raises ValueError when none is."""
    finite = torch.isfinite(rewards)
    if not finite.any():
        raise ValueError(
            f"none of the {rewards.numel()} rewards of this rollout is finite; "
            "check the reward function (--rm-type, --custom-rm-path)"
        )
    return finite
