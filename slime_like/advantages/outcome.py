"""Numbers of whole samples: the groups of a rollout, and what is done about rewards that are not
finite and groups of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from slime_like.advantages.registry import GroupRewards, OutcomeEstimator, advantage_estimators
from slime_like.lazy import Tensor, torch
from slime_like.losses.checks import require_choice, require_ids, require_shape, require_tensor

Singleton = Literal["zero", "reward"]
SINGLETONS: tuple[str, ...] = ("zero", "reward")


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """values: [B] float32, one per sample, for all its active tokens. metrics: plain numbers by
    name."""

    values: Tensor
    metrics: Mapping[str, float]


def compute_advantages(
    estimator: str,
    *,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    normalize_std: bool = True,
    singleton: Singleton = "zero",
) -> AdvantageOutput:
    """Advantages of all samples of a rollout, by an estimator that gives one number to a sample.

    A sample without a finite reward leaves the statistics and gets 0; so does a group of one, with
    a warning, unless
    `singleton` asks for the reward itself.

    Args:
        estimator: a registered name, e.g. "grpo".
        rewards: [B], with any KL penalty already taken off; NaN or infinite where a sample has no
        usable reward. group_ids: [B] integers, the prompt; groups may have any size. lengths: [B]
        integers >= 0, active tokens. normalize_std: False: Dr. GRPO. singleton: "zero" or "reward".

    Returns:
        Advantages [B] and metrics.

    Raises:
        ValueError: for an unknown estimator or `singleton`, an estimator that gives every token its
        own advantage, a wrong
            shape, and when no reward is finite.
    """
    _check_samples(rewards, group_ids, lengths, singleton)
    entry = advantage_estimators.get(estimator)
    if not isinstance(entry, OutcomeEstimator):
        raise ValueError(
            f"{estimator} gives each token its own advantage; see slime_like.advantages.estimate_advantages"
        )
    output = over_groups(
        entry.fn, rewards, group_ids, lengths, normalize_std=normalize_std, singleton=singleton
    )
    values = output.values
    if entry.batch_factor is not None:
        values = torch.where(
            output.differing,
            values * entry.batch_factor(rewards.numel(), int(output.differing.sum())),
            values,
        )
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
    """values: [B] float64. differing: [B] bool, finite rewards of groups whose rewards differ."""

    values: Tensor
    differing: Tensor
    metrics: Mapping[str, float]


def over_groups(
    fn: Callable[[GroupRewards], Tensor],
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    *,
    normalize_std: bool = True,
    singleton: Singleton = "zero",
) -> GroupOutput:
    """`fn` of each group; arguments and errors as of `compute_advantages`."""
    rewards = rewards.double()
    finite = finite_rewards(rewards)
    values = torch.zeros_like(rewards)
    differing = torch.zeros_like(finite)
    flat = single = 0
    groups = group_ids.unique()
    for group_id in groups:
        members = ((group_ids == group_id) & finite).nonzero().squeeze(1)
        group = GroupRewards(rewards[members], lengths[members].double(), normalize_std)
        if members.numel() >= 2:
            if (group.rewards == group.rewards[0]).all():
                flat += 1  # exactly 0: the mean of equal numbers may round away from them
            else:
                values[members] = fn(group)
                differing[members] = True
        elif members.numel() == 1:
            single += 1
            if singleton == "reward":
                values[members] = group.rewards
    if single and singleton == "zero":
        warnings.warn(
            "a group with a single usable sample has advantage 0 (--singleton-advantage)",
            stacklevel=3,
        )
    metrics = {
        "reward/nonfinite": float((~finite).sum()),
        "reward/zero_spread_group_frac": flat / groups.numel(),
        "reward/singleton_groups": float(single),
    }
    return GroupOutput(values, differing, metrics)


def finite_rewards(rewards: Tensor) -> Tensor:
    """[B] bool. Raises ValueError when none is."""
    finite = torch.isfinite(rewards)
    if not finite.any():
        raise ValueError(
            f"none of the {rewards.numel()} rewards of this rollout is finite; see the reward function (--rm-type, --custom-rm-path)"
        )
    return finite
