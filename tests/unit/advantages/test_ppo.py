"""PPO's estimator against a loop over tokens, in float64."""

from __future__ import annotations

import pytest
import torch

from slime_like.advantages import (
    AdvantageSettings,
    discounted_returns,
    estimate_advantages,
    token_rewards,
    whiten,
)
from tests.unit.advantages.token_cases import (
    NAN,
    REWARDS,
    critic_values,
    estimate,
    flat,
    gae_by_loop,
    outcomes,
    penalised,
    samples,
)


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
