"""Single-rollout asynchronous optimization, arXiv 2607.07508: the policy's loss and gradient, and
the critic's targets, against loops written from equations 1 to 5, in float64. The critic's steps
are in tests/dist/test_critic.py."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.advantages import AdvantageSettings, estimate_advantages
from slime_like.losses import compute_policy_loss, token_weights
from slime_like.losses.rollout_is import RolloutISConfig
from tests.unit.advantages.token_cases import LENGTHS, REWARDS, critic_values, outcomes, samples


@pytest.mark.parametrize(("low", "high"), [(0.3, 5.0), (0.8, 3.0)])
def test_the_objective_is_the_papers(low: float, high: float) -> None:
    """L = mean_t f(r_t) A_t log p_t. f(r) is r inside (1 - low, 1 + high) and 0 outside, a constant;
    the advantage of an action's last token continues with the next action's first, whatever was
    observed between them; lambda is 1 - 1 / (1.5 l) for the policy, and 1 for the critic."""
    masks, kl = samples(7)
    values = critic_values(masks)
    estimated = estimate_advantages(
        AdvantageSettings("ppo", lambd_length_alpha=1.5, value_lambd=1.0),
        outcomes(masks),
        local_indices=range(7),
        masks=masks,
        kl=kl,
        critic_values=values,
    )
    generator = torch.Generator().manual_seed(3)
    engine = [-3 * torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    moved = [1.2 * torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    leaf = torch.cat([e + m for e, m in zip(engine, moved)]).requires_grad_()
    mask = torch.cat(masks)
    ids = torch.repeat_interleave(torch.arange(7), torch.tensor(LENGTHS))
    loss = compute_policy_loss(
        "rollout_is",
        leaf,
        mask,
        token_weights("token_mean", mask, seq_ids=ids),
        seq_ids=ids,
        config=RolloutISConfig(low, high),
        advantages=torch.cat(estimated.values).double(),
        rollout_log_probs=torch.cat(engine),
    ).loss
    (found,) = torch.autograd.grad(loss, leaf)

    assert estimated.returns is not None
    active = int(mask.sum())
    total, gradient, inside = 0.0, [], 0
    log_probs = iter(leaf.tolist())
    for i in range(7):
        actions = [t for t in range(LENGTHS[i]) if masks[i][t]]
        lambd = max(0.0, 1 - 1 / (1.5 * len(actions))) if actions else 0.0
        advantage, target = 0.0, 0.0
        advantages = {}
        for position in reversed(range(len(actions))):
            t = actions[position]
            last = position == len(actions) - 1
            reward = REWARDS[i] if last else 0.0
            after = 0.0 if last else float(values[i][actions[position + 1]])
            delta = reward + after - float(values[i][t])
            advantage = delta + lambd * advantage
            target += reward
            advantages[t] = advantage
            assert float(estimated.returns[i][t]) == pytest.approx(target, abs=1e-6)
        for t in range(LENGTHS[i]):
            log_p = next(log_probs)
            if t not in advantages:
                gradient.append(0.0)
                continue
            r = math.exp(log_p - float(engine[i][t]))
            f = r if 1 - low < r < 1 + high else 0.0
            inside += f > 0
            total -= f * advantages[t] * log_p / active
            gradient.append(-f * advantages[t] / active)
    assert 0 < inside < active
    assert loss.item() == pytest.approx(total, rel=1e-5)  # advantages are stored in float32
    torch.testing.assert_close(
        found, torch.tensor(gradient, dtype=torch.float64), rtol=1e-5, atol=1e-7
    )
