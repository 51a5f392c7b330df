"""Estimators that give each token its own advantage, GAE, whitening, and the KL in the reward,
against loops in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.advantages import (
    AdvantageSettings,
    KLController,
    Outcomes,
    TokenAdvantages,
    advantage_estimators,
    compute_advantages,
    discounted_returns,
    estimate_advantages,
    gae,
    token_kl,
    token_rewards,
    whiten,
)
from slime_like.losses.kl import kl_estimate

NAN, INF = math.nan, math.inf
LENGTHS = (6, 1, 9, 4, 0, 5, 3)
GROUPS = (2, 2, 0, 0, 0, 7, 7)
REWARDS = (1.0, 0.0, 0.5, -1.0, 2.0, 3.0, 0.25)


def samples(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Masks with tool spans, leading and trailing inactive tokens, one empty and one wholly masked
    response; and a KL for each token."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(n, generator=generator) > 0.4 for n in LENGTHS]
    masks[0][:] = torch.tensor([False, True, True, False, False, True])
    masks[3][:] = False
    masks[5][-2:] = False
    kl = [
        torch.where(m, torch.randn(m.numel(), generator=generator, dtype=torch.float64), 0.0)
        for m in masks
    ]
    return masks, kl


def outcomes(
    masks: Sequence[Tensor],
    rewards: Sequence[float] = REWARDS,
    greedy: Sequence[float] | None = None,
) -> Outcomes:
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(GROUPS),
        lengths=torch.tensor([int(m.sum()) for m in masks]),
        greedy_rewards=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
    )


def critic_values(masks: Sequence[Tensor]) -> list[Tensor]:
    """A critic's, the same in every call; inactive tokens hold nothing usable."""
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randn(n, generator=generator) for n in LENGTHS]
    return [torch.where(mask, value, NAN) for mask, value in zip(masks, drawn)]


def energies_of(masks: Sequence[Tensor]) -> list[Tensor]:
    """The same in every call, as `critic_values`."""
    generator = torch.Generator().manual_seed(12)
    drawn = [torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [torch.where(mask, value, 0.0) for mask, value in zip(masks, drawn)]


def estimate(
    settings: AdvantageSettings,
    masks: Sequence[Tensor],
    kl: Sequence[Tensor] | None = None,
    *,
    rewards: Sequence[float] = REWARDS,
    greedy: Sequence[float] | None = None,
) -> TokenAdvantages:
    values = critic_values(masks) if settings.estimator == "ppo" else None
    batch = outcomes(masks, rewards, greedy)
    if settings.estimator == "grpo_token":
        each = [
            math.isfinite(r) * mask * 0.5 * i for i, (r, mask) in enumerate(zip(rewards, masks))
        ]
        batch = replace(batch, token_rewards=each)
    return estimate_advantages(
        settings,
        batch,
        local_indices=range(len(masks)),
        masks=masks,
        kl=kl,
        critic_values=values,
        energies=energies_of(masks),
    )


def returns_by_loop(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> list[float]:
    """Sum over the active tokens s >= t of gamma^(active tokens between) R_s."""
    active = [t for t in range(len(mask)) if mask[t]]
    result = [0.0] * len(mask)
    for i, t in enumerate(active):
        result[t] = sum(gamma ** (j - i) * rewards[s] for j, s in enumerate(active) if j >= i)
    return result


def gae_by_loop(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Sequence[bool],
    gamma: float,
    lambd: float,
) -> tuple[list[float], list[float]]:
    """The recursion of the specification, over the full response."""
    advantage = following = 0.0
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * following - values[t]
            advantage = delta + gamma * lambd * advantage
            following = values[t]
            advantages[t], returns[t] = advantage, advantage + values[t]
    return advantages, returns


def flat(parts: Sequence[Tensor] | Sequence[list[float]]) -> list[float]:
    return [float(x) for part in parts for x in part]


def penalised(reward: float, mask: Tensor, kl: Tensor, coef: float) -> list[float]:
    """Rewards of tokens, by loop."""
    result = [-coef * float(kl[t]) if mask[t] else 0.0 for t in range(mask.numel())]
    active = [t for t in range(mask.numel()) if mask[t]]
    if active:
        result[active[-1]] += reward
    return result


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_reinforce_plus_plus(gamma: float, seed: int) -> None:
    masks, kl = samples(seed)
    settings = AdvantageSettings("reinforce_plus_plus", gamma=gamma, kl_coef=0.3)
    got = estimate(settings, masks, kl)
    expected = [
        returns_by_loop(penalised(r, m, k, 0.3), m.tolist(), gamma)
        for r, m, k in zip(REWARDS, masks, kl)
    ]
    assert flat(got.values) == pytest.approx(flat(expected), rel=1e-6, abs=1e-7)
    assert all(v.dtype == torch.float32 for v in got.values)
    total, active = sum(float(k.sum()) for k in kl), sum(int(m.sum()) for m in masks)
    assert got.metrics["rollout/kl_in_reward"] == pytest.approx(total / active)


def test_reinforce_plus_plus_baseline() -> None:
    masks, kl = samples(4)
    got = estimate(AdvantageSettings("reinforce_plus_plus_baseline", kl_coef=0.3), masks, kl)
    for i, (mask, k) in enumerate(zip(masks, kl)):
        peers = [r for r, g in zip(REWARDS, GROUPS) if g == GROUPS[i]]
        mean = sum(peers) / len(peers)
        expected = [
            REWARDS[i] - mean - 0.3 * float(k[t]) if mask[t] else 0.0 for t in range(mask.numel())
        ]
        assert got.values[i].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_remax(gamma: float) -> None:
    masks, kl = samples(5)
    greedy = [0.5, 0.5, 1.0, 1.0, 1.0, -2.0, -2.0]
    got = estimate(AdvantageSettings("remax", gamma=gamma, kl_coef=0.1), masks, kl, greedy=greedy)
    for i, (mask, k) in enumerate(zip(masks, kl)):
        returns = returns_by_loop(penalised(REWARDS[i], mask, k, 0.1), mask.tolist(), gamma)
        expected = [
            value - greedy[i] if active else 0.0 for value, active in zip(returns, mask.tolist())
        ]
        assert got.values[i].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_remax_without_greedy_rewards_is_an_error_and_a_bad_one_is_left_out() -> None:
    masks, _ = samples(0)
    with pytest.raises(ValueError, match="reward of a greedy response"):
        estimate(AdvantageSettings("remax"), masks)
    got = estimate(AdvantageSettings("remax"), masks, greedy=[NAN, NAN, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert not got.values[0].any() and got.values[2].any()
    assert got.metrics["reward/greedy_nonfinite"] == 2


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "opo", "gpg", "gdpo", "pass_at_k"])
def test_estimators_of_samples_take_the_kl_off_before_grouping(name: str) -> None:
    masks, kl = samples(6)
    got = estimate(AdvantageSettings(name, kl_coef=0.2), masks, kl)
    rewards = torch.tensor(
        [r - 0.2 * float(k.sum()) for r, k in zip(REWARDS, kl)], dtype=torch.float64
    )
    lengths = torch.tensor([int(m.sum()) for m in masks])
    expected = compute_advantages(
        name, rewards=rewards, group_ids=torch.tensor(GROUPS), lengths=lengths
    ).values
    for value, mask, number in zip(got.values, masks, expected):
        torch.testing.assert_close(value, torch.where(mask, number, 0.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 0.9)])
def test_gae(seed: int, gamma: float, lambd: float) -> None:
    masks, rewards = samples(seed)
    draw = random.Random(seed)
    values = [
        torch.tensor([draw.gauss(0, 2) for _ in range(n)], dtype=torch.float64) for n in LENGTHS
    ]
    for value, mask in zip(values, masks):
        value[~mask] = NAN  # never seen
    advantages, returns = gae(rewards, values, masks, gamma, lambd)
    expected = [
        gae_by_loop(r.tolist(), v.tolist(), m.tolist(), gamma, lambd)
        for r, v, m in zip(rewards, values, masks)
    ]
    assert flat(advantages) == pytest.approx(flat([e[0] for e in expected]), rel=1e-12, abs=1e-12)
    assert flat(returns) == pytest.approx(flat([e[1] for e in expected]), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["ppo", "gae"])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8)])
def test_ppo(name: str, gamma: float, lambd: float) -> None:
    """Rewards of tokens with the KL in them, through the recursion; the critic's targets are A + V
    before whitening."""
    masks, kl = samples(7)
    values = critic_values(masks)
    batch = outcomes(masks)
    got, whitened = (
        estimate_advantages(
            AdvantageSettings(name, gamma=gamma, lambd=lambd, kl_coef=0.2, normalize=normalize),
            batch,
            local_indices=range(7),
            masks=masks,
            kl=kl,
            critic_values=values,
        )
        for normalize in (False, True)
    )
    assert got.returns is not None and whitened.returns is not None
    for i, (mask, k, value) in enumerate(zip(masks, kl, values)):
        rewards = penalised(REWARDS[i], mask, k, 0.2)
        advantages, returns = gae_by_loop(rewards, value.tolist(), mask.tolist(), gamma, lambd)
        assert got.values[i].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-7)
        assert got.returns[i].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-7)
        assert torch.equal(got.returns[i], whitened.returns[i])
    expected = whiten([v.double() for v in got.values], masks)
    for found, value in zip(whitened.values, expected):
        torch.testing.assert_close(found, value.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_lambd", [None, 1.0, 0.3])
@pytest.mark.parametrize("alpha", [None, 0.05, 0.4])
def test_the_critics_lambda_and_the_policys_by_length(
    value_lambd: float | None, alpha: float | None
) -> None:
    """VC-PPO: advantages of the policy's lambda, returns of the critic's, each by the recursion.
    VAPO: the policy's is 1 - 1 / (alpha l), at least 0."""
    masks, kl = samples(8)
    values, gamma, lambd = critic_values(masks), 0.97, 0.8
    settings = AdvantageSettings(
        "ppo",
        gamma=gamma,
        lambd=lambd,
        value_lambd=value_lambd,
        lambd_length_alpha=alpha,
        kl_coef=0.2,
    )
    got = estimate_advantages(
        settings, outcomes(masks), local_indices=range(7), masks=masks, kl=kl, critic_values=values
    )
    assert got.returns is not None
    for i, (mask, k, value) in enumerate(zip(masks, kl, values)):
        rewards, length = penalised(REWARDS[i], mask, k, 0.2), int(mask.sum())
        own = lambd
        if alpha is not None and length:
            own = max(0.0, 1 - 1 / (alpha * length))
        advantages, returns = gae_by_loop(rewards, value.tolist(), mask.tolist(), gamma, own)
        if value_lambd is not None or alpha is not None:
            of_critic = lambd if value_lambd is None else value_lambd
            _, returns = gae_by_loop(rewards, value.tolist(), mask.tolist(), gamma, of_critic)
        assert got.values[i].tolist() == pytest.approx(advantages, rel=1e-6, abs=1e-7)
        assert got.returns[i].tolist() == pytest.approx(returns, rel=1e-6, abs=1e-7)


def test_a_lambda_of_one_for_the_critic_is_the_return_to_go() -> None:
    """VC-PPO's reason: the values do not enter their own targets."""
    masks, _ = samples(8)
    settings = AdvantageSettings("ppo", lambd=0.95, value_lambd=1.0)
    got = estimate(settings, masks)
    assert got.returns is not None
    for reward, mask, found in zip(REWARDS, masks, got.returns):
        expected = torch.where(mask, reward, 0.0)
        torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)
    assert flat(got.values) != pytest.approx(flat(estimate(AdvantageSettings("ppo"), masks).values))


def test_equal_lambdas_are_one_estimate_to_the_last_bit() -> None:
    masks, kl = samples(9)
    once, twice = (
        estimate(
            AdvantageSettings("ppo", gamma=0.9, lambd=0.7, value_lambd=own, kl_coef=0.1), masks, kl
        )
        for own in (None, 0.7)
    )
    assert once.returns is not None and twice.returns is not None
    for a, b in zip(once.values + once.returns, twice.values + twice.returns):
        assert torch.equal(a, b)


def test_ppo_without_values_is_an_error_and_a_bad_reward_is_no_target() -> None:
    masks, _ = samples(7)
    with pytest.raises(ValueError, match="ppo needs a critic's values"):
        estimate_advantages(
            AdvantageSettings("ppo"), outcomes(masks), local_indices=range(7), masks=masks
        )
    got = estimate(
        AdvantageSettings("ppo"),
        masks,
        rewards=[NAN if i == 2 else r for i, r in enumerate(REWARDS)],
    )
    assert got.returns is not None
    for i, (mask, value) in enumerate(zip(masks, got.returns)):
        assert torch.equal(value.isnan(), mask if i == 2 else torch.zeros_like(mask))
        assert not value[~mask].any()


def test_a_tools_output_is_passed_over_and_a_reward_crosses_it() -> None:
    mask = torch.tensor([True, True, False, False, True, False])
    rewards = token_rewards([1.0], [mask], [torch.zeros(6)])
    assert rewards[0].tolist() == [0, 0, 0, 0, 1, 0], "paid at the last active token"
    assert discounted_returns(rewards, [mask], 0.5)[0].tolist() == [0.25, 0.5, 0, 0, 1, 0]
    same = discounted_returns(
        [torch.tensor([0.0, 0, 0, 0, 0, 1.0])], [mask], 0.5
    )  # at an inactive token: the active one before it
    assert same[0].tolist() == [0.25, 0.5, 0, 0, 1, 0]
    inside = discounted_returns([torch.tensor([0.0, 0, 0, 1.0, 0, 0])], [mask], 0.5)
    assert inside[0].tolist() == [0.5, 1, 0, 0, 0, 0]
    before = discounted_returns([torch.tensor([1.0, 0.0])], [torch.tensor([False, True])], 0.5)
    assert before[0].tolist() == [0, 0], "nobody's"


@pytest.mark.parametrize("name", advantage_estimators.names())
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_reward_or_kl_leaves_the_others_alone(name: str, normalize: bool, bad: float) -> None:
    """Whether a sample's reward or its KL is broken, the rest is as if its mask were empty and its
    reward missing; it gets 0 itself."""
    masks, kl = samples(1)
    greedy = [0.5] * 7
    settings = AdvantageSettings(name, normalize=normalize, kl_coef=0.1)
    missing = [NAN if i == 2 else r for i, r in enumerate(REWARDS)]
    rewards = [bad if i == 2 else r for i, r in enumerate(REWARDS)]
    got = estimate(settings, masks, kl, rewards=rewards, greedy=greedy)
    expected = estimate(
        settings, [m & (i != 2) for i, m in enumerate(masks)], kl, rewards=missing, greedy=greedy
    )
    broken = [torch.where(m & (i == 2), bad, k) for i, (m, k) in enumerate(zip(masks, kl))]
    by_kl = estimate(settings, masks, broken, greedy=greedy)
    for i in range(7):
        torch.testing.assert_close(got.values[i], expected.values[i])
        torch.testing.assert_close(by_kl.values[i], expected.values[i])
    assert not got.values[2].any() and masks[2].any()
    assert got.metrics["reward/nonfinite"] == by_kl.metrics["reward/nonfinite"] == 1
    assert all(math.isfinite(v) for v in by_kl.metrics.values())
    with pytest.raises(ValueError, match="none of the 7 rewards"):
        estimate(settings, masks, kl, rewards=[NAN] * 7, greedy=greedy)


@pytest.mark.parametrize("name", advantage_estimators.names())
def test_parts_of_a_rollout_give_what_the_whole_gives(name: str) -> None:
    """Ranks hold different samples of the same rollout; without whitening they need nothing of each
    other but the KL's sums. Two compare tokens across ranks: tests/dist/test_whitening.py."""
    if name in ("otb", "grpo_token"):
        return
    masks, _ = samples(2)
    settings, batch = AdvantageSettings(name, gamma=0.9), outcomes(masks, greedy=[0.5] * 7)
    critic = critic_values(masks)
    whole = estimate_advantages(
        settings, batch, local_indices=range(7), masks=masks, critic_values=critic
    ).values
    for part in ([0, 3, 6], [5], [2, 1, 4]):
        some = [critic[i] for i in part]
        values = estimate_advantages(
            settings, batch, local_indices=part, masks=[masks[i] for i in part], critic_values=some
        ).values
        for i, value in zip(part, values):
            torch.testing.assert_close(value, whole[i])


def test_whitening() -> None:
    masks, kl = samples(3)
    values = [
        torch.where(m, 1e4 + k, NAN) for m, k in zip(masks, kl)
    ]  # far from 0: one pass in float32 would lose the variance
    got = whiten(values, masks)
    active = [float(x) for k, m in zip(kl, masks) for x in k[m]]
    mean = sum(active) / len(active)
    variance = sum((x - mean) ** 2 for x in active) / (len(active) - 1)
    for result, k, mask in zip(got, kl, masks):
        expected = [
            (float(x) - mean) / math.sqrt(variance + 1e-8) if m else 0.0
            for x, m in zip(k, mask.tolist())
        ]
        assert result.tolist() == pytest.approx(expected, rel=1e-6)


def test_whitening_of_equal_values_of_one_token_and_of_none() -> None:
    assert whiten([torch.tensor([3.0, 3.0, 3.0])], [torch.tensor([True, True, False])])[
        0
    ].tolist() == [0, 0, 0]
    assert whiten([torch.tensor([7.0, 9.0])], [torch.tensor([True, False])])[0].tolist() == [0, 0]
    with pytest.raises(ValueError, match="no token of this rollout"):
        whiten([torch.tensor([7.0])], [torch.tensor([False])])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl", "abs"])
def test_token_kl_sees_active_tokens_only(kind: str) -> None:
    masks, old = samples(0)
    ref = [torch.randn(m.numel(), dtype=torch.float64) for m in masks]
    dirty = [torch.where(m, x, NAN) for m, x in zip(masks, ref)]
    for mask, got, o, f in zip(masks, token_kl(kind, old, dirty, masks), old, ref):
        assert torch.equal(got, torch.where(mask, kl_estimate(kind, o, f), 0.0))


def test_controllers() -> None:
    fixed = KLController(0.2)
    fixed.update(5.0, 1000)
    fixed.load_state_dict({"value": 9.0})
    assert fixed.value == 0.2, "the command line says what a fixed coefficient is"
    adaptive = KLController(0.2, target=0.1, horizon=10000)
    adaptive.update(0.11, 500)
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.1 * 500 / 10000))
    adaptive.update(5.0, 500)  # clipped at 0.2 above
    assert adaptive.value == pytest.approx(0.2 * (1 + 0.1 * 0.05) * (1 + 0.2 * 0.05))
    before = adaptive.value
    adaptive.update(-5.0, 500)  # k1 may be negative: clipped at 0.2 below
    assert adaptive.value == pytest.approx(before * (1 - 0.2 * 0.05))
    other = KLController(0.2, target=0.1, horizon=10000)
    other.load_state_dict(adaptive.state_dict())
    assert other.value == adaptive.value
    adaptive.update(NAN, 500)
    assert adaptive.value == other.value
