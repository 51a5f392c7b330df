"""Advantages against loops over groups; bad rewards, odd groups."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slime_like.advantages import (
    AdvantageOutput,
    OutcomeEstimator,
    advantage_estimators,
    compares_samples,
    compute_advantages,
)

NAN, INF = math.nan, math.inf
# of groups; batch_mean has none
OUTCOME = [
    name
    for name, entry in advantage_estimators.items()
    if isinstance(entry, OutcomeEstimator) and not entry.over_batch
]


def compute(
    estimator: str, rewards: Sequence[float], groups: Sequence[int], **settings: Any
) -> AdvantageOutput:
    return compute_advantages(
        estimator,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(groups),
        lengths=torch.arange(1, len(rewards) + 1),
        **settings,
    )


@dataclass(frozen=True)
class Peers:
    """The finite rewards of a group, with the lengths of their responses."""

    rewards: list[float]
    lengths: list[int]
    normalize_std: bool

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def scale(self) -> float:
        return statistics.stdev(self.rewards) + 1e-6 if self.normalize_std else 1.0

    def others(self, reward: float) -> list[float]:
        """Without one response of this reward; of two that are the best, neither is missed."""
        rest = list(self.rewards)
        rest.remove(reward)
        return rest


# of a reward among its peers; gpg's factor and gdpo's second normalisation are of the rollout
FORMULAS: dict[str, Callable[[float, Peers], float]] = {
    "grpo": lambda r, peers: (r - peers.mean) / peers.scale,
    "gdpo": lambda r, peers: (r - peers.mean) / peers.scale,
    "rloo": lambda r, peers: r - statistics.mean(peers.others(r)),
    "maxrl": lambda r, peers: (r - peers.mean) / peers.mean if peers.mean > 0 else 0.0,
    "opo": lambda r, peers: (
        r - sum(n * x for n, x in zip(peers.lengths, peers.rewards)) / sum(peers.lengths)
    ),
    "gpg": lambda r, peers: r - peers.mean,
    "pass_at_k": lambda r, peers: (max(peers.rewards) - max(peers.others(r))) / peers.scale,
}


def by_loop(
    estimator: str, rewards: Sequence[float], groups: Sequence[int], normalize_std: bool = True
) -> list[float]:
    """Lengths are 1, 2, 3, ..., as in `compute`."""
    values = []
    num_differing = 0
    for reward, group in zip(rewards, groups):
        members = [
            (r, i + 1)
            for i, (r, g) in enumerate(zip(rewards, groups))
            if g == group and math.isfinite(r)
        ]
        peers = Peers([r for r, _ in members], [n for _, n in members], normalize_std)
        num_differing += math.isfinite(reward) and len(set(peers.rewards)) > 1
        usable = math.isfinite(reward) and len(members) > 1
        values.append(FORMULAS[estimator](reward, peers) if usable else 0.0)
    if estimator == "gpg":
        return [len(rewards) / num_differing * value for value in values]
    if estimator == "gdpo":
        finite = [value for value, reward in zip(values, rewards) if math.isfinite(reward)]
        scale = statistics.stdev(finite) + 1e-6
        return [(value - statistics.mean(finite)) / scale if value else 0.0 for value in values]
    return values


REWARDS = [1.0, 0.0, 0.5, 2.0, -1.0, 0.0, 0.25, 7.0, 1e6]
GROUPS = [3, 1, 3, 1, 3, 1, 1, -4, -4]  # uneven and interleaved


@pytest.mark.parametrize(
    ("estimator", "settings"),
    [(name, {}) for name in FORMULAS]
    + [(name, {"normalize_std": False}) for name in ("grpo", "pass_at_k", "gdpo")],
)
def test_advantages_are_the_formula(estimator: str, settings: dict[str, bool]) -> None:
    output = compute(estimator, REWARDS, GROUPS, **settings)
    assert output.values.dtype == torch.float32
    assert output.values.tolist() == pytest.approx(
        by_loop(estimator, REWARDS, GROUPS, **settings), rel=1e-6
    )


def test_grpo_uses_bessels_correction() -> None:
    """Rewards 1 and 0: mean 0.5, std sqrt(0.5); without Bessel, std 0.5 and advantage 1."""
    assert compute("grpo", [1.0, 0.0], [0, 0]).values.tolist() == pytest.approx(
        [0.5**0.5, -(0.5**0.5)], rel=1e-5
    )


@pytest.mark.parametrize("estimator", OUTCOME)
def test_order_of_samples_and_other_groups_do_not_matter(estimator: str) -> None:
    values = compute(estimator, REWARDS, GROUPS).values
    order = [8, 3, 0, 5, 2, 7, 1, 6, 4]
    shuffled = compute_advantages(
        estimator,
        rewards=torch.tensor(REWARDS, dtype=torch.float64)[order],
        group_ids=torch.tensor(GROUPS)[order],
        lengths=torch.arange(1, 10)[order],
    ).values
    torch.testing.assert_close(shuffled, values[order])
    if estimator == "gdpo":
        return  # normalised over all groups
    alone = compute_advantages(
        estimator,
        rewards=torch.tensor(REWARDS, dtype=torch.float64)[[0, 2, 4]],
        group_ids=torch.tensor([3, 3, 3]),
        lengths=torch.tensor([1, 3, 5]),
    ).values
    torch.testing.assert_close(
        alone, values[[0, 2, 4]]
    )  # gpg too: all groups here differ, so its factor is 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("estimator", OUTCOME)
def test_a_bad_reward_leaves_its_group_unharmed(estimator: str, bad: float) -> None:
    rewards, groups = [1.0, bad, 0.0, 0.5, 1.0, 3.0], [0, 0, 0, 0, 1, 1]
    output = compute(estimator, rewards, groups)
    if estimator in FORMULAS:
        expected = by_loop(estimator, rewards, groups)
        assert output.values.tolist() == pytest.approx(expected, rel=1e-6)
    if estimator != "gpg":  # whose factor counts all samples
        kept = torch.tensor([0, 2, 3, 4, 5])
        without = compute_advantages(
            estimator,
            rewards=torch.tensor(rewards)[kept],
            group_ids=torch.tensor(groups)[kept],
            lengths=torch.arange(1, 7)[kept],
        ).values
        torch.testing.assert_close(output.values[kept], without)
    assert output.values[1] == 0
    assert output.metrics["reward/nonfinite"] == 1


def test_no_finite_reward_at_all_raises() -> None:
    with pytest.raises(ValueError, match="none of the 3 rewards"):
        compute("grpo", [NAN, INF, -INF], [0, 0, 1])


@pytest.mark.parametrize("estimator", OUTCOME)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6, -1 / 3])
def test_equal_rewards_give_exactly_zero(estimator: str, reward: float) -> None:
    """The mean of three times 0.1 is not exactly 0.1; a division by the tiny standard deviation
    would turn rounding into a signal."""
    for size in (2, 3, 7):
        output = compute(estimator, [reward] * size + [1.0, 0.0], [5] * size + [6, 6])
        assert output.values[:size].tolist() == [0.0] * size
        assert output.metrics["reward/zero_spread_group_frac"] == 0.5


@pytest.mark.parametrize("estimator", OUTCOME)
def test_a_group_of_one(estimator: str) -> None:
    rewards, groups = [4.0, 1.0, 0.0, 2.0, NAN], [0, 1, 1, 2, 2]  # group 2 has one usable reward
    with pytest.warns(UserWarning, match="--singleton-advantage") as caught:
        output = compute(estimator, rewards, groups)
    assert caught[0].filename == __file__  # the caller's line, not the library's
    assert output.values[[0, 3, 4]].tolist() == [0, 0, 0]
    assert output.metrics["reward/singleton_groups"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = compute(estimator, rewards, groups, singleton="reward")
    assert chosen.values[[0, 3, 4]].tolist() == [4, 2, 0]
    assert torch.equal(chosen.values[1:3], output.values[1:3])


def test_the_warning_about_groups_of_one_comes_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for count in (1, 2, 3):
            compute("grpo", [1.0] * count, list(range(count)))
    assert len(seen) == 1


def test_an_unknown_estimator_names_the_legal_ones() -> None:
    with pytest.raises(
        ValueError,
        match="unknown advantage estimator 'ppo2'; legal values: batch_mean, gdpo, gpg, grpo, ",
    ):
        compute("ppo2", [1.0], [0])


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], [0] * 6])
def test_batch_mean_has_one_baseline_for_all_prompts(groups: list[int]) -> None:
    """One answer a prompt learns, without a warning; a reward that is missing has no part in it."""
    rewards = [1.0, 0.0, 0.5, math.nan, 2.0, 0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = compute("batch_mean", rewards, groups)
    mean = 3.5 / 5
    expected = [0.0 if math.isnan(r) else r - mean for r in rewards]
    torch.testing.assert_close(output.values, torch.tensor(expected))
    assert (
        output.metrics["reward/nonfinite"] == 1 and output.metrics["reward/singleton_groups"] == 0
    )
    assert compute("batch_mean", [0.1] * 6, groups).values.tolist() == [0.0] * 6
    assert not compares_samples(advantage_estimators.get("batch_mean"))


def test_maxrl_gives_up_groups_without_success() -> None:
    """A mean of 0 or below would divide by 0 or turn the sign."""
    assert compute(
        "maxrl", [-1.0, 0.5, 1.0, -1.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2]
    ).values.tolist() == [0, 0, 0, 0, 1, -1]


def test_pass_at_k_is_the_gradient_of_the_best_of_a_group() -> None:
    """In expectation over two samples of a policy over three responses, by automatic
    differentiation: d E[max(R_1, R_2)] = E[sum_i A_i d log p_i]. Where both are the same response,
    neither is missed."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    rewards = [0.0, 1.0, 2.5]
    probs = logits.softmax(0)
    best = found = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            both = probs[i] * probs[j]
            best = best + both * max(rewards[i], rewards[j])
            values = compute("pass_at_k", [rewards[i], rewards[j]], [0, 0], normalize_std=False)
            credit = values.values.double() @ torch.stack([probs[i].log(), probs[j].log()])
            found = found + both.detach() * credit
    # the leave-one-out baseline max(others) of one sample has an expected gradient of 0
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, retain_graph=True)[0],
        torch.autograd.grad(best, logits)[0],
    )


def test_pass_at_k_has_verls_numbers() -> None:
    """grpo_passk of verl (January 2026) for these rewards."""
    values = compute("pass_at_k", [1.0, -0.5, 2.0, 0.25], [0, 0, 0, 0]).values
    assert values.tolist() == pytest.approx([0, 0, 0.93632830, 0], rel=1e-6)


def test_pass_at_k_gives_nothing_where_two_are_best() -> None:
    assert compute("pass_at_k", [1.0, 0.0, 1.0, 0.5], [0, 0, 0, 0]).values.tolist() == [0, 0, 0, 0]


def test_gpg_counts_the_samples_of_groups_that_differ() -> None:
    values = compute(
        "gpg",
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, NAN, 1.0],
        [0, 0, 1, 1, 2, 2, 3, 3],
        singleton="reward",
    ).values
    assert values.tolist() == [4 * 0.5, -4 * 0.5, 0, 0, 0, 0, 0, 1]


def test_an_estimator_of_tokens_does_not_stand_in_for_one_of_samples() -> None:
    with pytest.raises(ValueError, match="gives each token its own advantage"):
        compute("reinforce_plus_plus", [1.0, 0.0], [0, 0])
