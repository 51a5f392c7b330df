"""clip_cov and kl_cov against loops in float64: whom they choose, what that does, and that they
depend on the micro-batch as they say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from slime_like.losses import LossInputs, LossTerms, policy_losses, total_loss
from slime_like.losses.clip_cov import ClipCovConfig
from slime_like.losses.covariance import covariances, pick
from slime_like.losses.kl_cov import KLCovConfig
from slime_like.losses.ppo import PPOConfig
from tests.unit.losses.loss_cases import clamp20, gradient, make, value

CLIP_COV, KL_COV, PPO = (
    policy_losses.get("clip_cov"),
    policy_losses.get("kl_cov"),
    policy_losses.get("ppo"),
)
COUNT = 60


def random_inputs(seed: int = 0, **fields: Any) -> tuple[torch.Tensor, LossInputs]:
    g = torch.Generator().manual_seed(seed)
    log_ratio = 0.3 * torch.randn(COUNT, generator=g, dtype=torch.float64)
    log_ratio[5], log_ratio[6] = 50.0, -50.0
    advantages = torch.randn(COUNT, generator=g, dtype=torch.float64)
    mask = torch.rand(COUNT, generator=g) < 0.8
    return make(log_ratio, advantages, mask, **fields)


def loop_covariances(leaf: torch.Tensor, inputs: LossInputs) -> list[float]:
    assert inputs.advantages is not None
    rows = [t for t in range(COUNT) if inputs.loss_mask[t]]
    a_mean = sum(float(inputs.advantages[t]) for t in rows) / len(rows)
    l_mean = sum(float(leaf[t].detach()) for t in rows) / len(rows)
    return [
        (float(inputs.advantages[t]) - a_mean) * (float(leaf[t].detach()) - l_mean)
        if inputs.loss_mask[t]
        else 0.0
        for t in range(COUNT)
    ]


def test_covariances_are_over_active_tokens() -> None:
    leaf, inputs = random_inputs()
    assert covariances(inputs).tolist() == pytest.approx(loop_covariances(leaf, inputs), rel=1e-12)
    assert not covariances(inputs).requires_grad


@pytest.mark.parametrize("reject", [False, True])
@pytest.mark.parametrize("share", [2e-4, 0.1, 1.0])
def test_clip_cov_is_ppo_without_the_chosen(share: float, reject: bool) -> None:
    keep = torch.arange(COUNT) % 2 == 0 if reject else None
    leaf, inputs = random_inputs(keep_mask=keep)
    config = ClipCovConfig(clip_cov_ratio=share, clip_cov_lb=0.05, clip_cov_ub=2.0)
    ppo = PPO.fn(inputs, PPOConfig())
    losses = CLIP_COV.fn(inputs, config).token_losses
    chosen = inputs.loss_mask & (losses == 0) & (ppo.token_losses != 0)
    assert inputs.advantages is not None and inputs.old_log_probs is not None
    candidates = []
    for t, cov in enumerate(loop_covariances(leaf, inputs)):
        r, a = (
            math.exp(clamp20(float((leaf.detach() - inputs.old_log_probs)[t]))[0]),
            float(inputs.advantages[t]),
        )
        clipped = -a * min(max(r, 0.8), 1.2) > -a * r
        if inputs.loss_mask[t] and (keep is None or keep[t]) and not clipped and 0.05 < cov < 2.0:
            candidates.append(t)
    wanted = max(1, math.floor(share * int(inputs.loss_mask.sum())))
    assert len(candidates) > 3
    assert set(chosen.nonzero().flatten().tolist()) <= set(candidates)
    assert int(chosen.sum()) == min(wanted, len(candidates))
    expected = torch.where(chosen, 0.0, gradient(PPO, PPOConfig(), leaf, inputs))
    torch.testing.assert_close(gradient(CLIP_COV, config, leaf, inputs), expected)
    assert value(CLIP_COV.fn(inputs, config).metrics["clip_cov_frac"]) == pytest.approx(
        int(chosen.sum()) / int(inputs.loss_mask.sum())
    )


def test_clip_cov_draws_by_its_seed_alone() -> None:
    """The same tokens on every rank that is given the same seed, and other ones with another; each
    candidate has its chance."""
    config = ClipCovConfig(clip_cov_ratio=2e-4, clip_cov_lb=0.05, clip_cov_ub=2.0)

    def chosen(seed: int) -> int:
        torch.manual_seed(seed + 1)  # the global generator has no part in it
        _, inputs = random_inputs(selection_seed=seed)
        differs = (
            CLIP_COV.fn(inputs, config).token_losses != PPO.fn(inputs, PPOConfig()).token_losses
        )
        (token,) = differs.nonzero().flatten().tolist()
        return int(token)

    before = torch.get_rng_state()
    assert [chosen(3) for _ in range(2)] == [chosen(3)] * 2
    torch.set_rng_state(before)
    CLIP_COV.fn(random_inputs()[1], config)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the global generator"
    assert len({chosen(seed) for seed in range(60)}) > 8


def test_without_a_candidate_clip_cov_is_ppo() -> None:
    _leaf, inputs = random_inputs()
    config = ClipCovConfig(clip_cov_lb=1e6, clip_cov_ub=2e6)
    assert torch.equal(
        CLIP_COV.fn(inputs, config).token_losses, PPO.fn(inputs, PPOConfig()).token_losses
    )


@pytest.mark.parametrize("reject", [False, True])
@pytest.mark.parametrize("config", [KLCovConfig(), KLCovConfig(2e-4, 0.3), KLCovConfig(1.0, 2.0)])
def test_kl_cov_is_the_formula(config: KLCovConfig, reject: bool) -> None:
    keep = torch.arange(COUNT) % 3 != 0 if reject else None
    leaf, inputs = random_inputs(keep_mask=keep)
    assert inputs.advantages is not None and inputs.old_log_probs is not None
    cov = loop_covariances(leaf, inputs)
    selectable = [t for t in range(COUNT) if inputs.loss_mask[t] and (keep is None or keep[t])]
    active = int(inputs.loss_mask.sum())
    wanted = max(1, math.floor(config.kl_cov_frac * active))
    chosen = sorted(selectable, key=lambda t: -cov[t])[:wanted]
    losses, grads = [], []
    for t in range(COUNT):
        d, stopped = clamp20(float((leaf.detach() - inputs.old_log_probs)[t]))
        a, r = float(inputs.advantages[t]), math.exp(d)
        penalty = config.kl_cov_coef if t in chosen else 0.0
        active_here = bool(inputs.loss_mask[t])
        losses.append(-a * r + penalty * abs(d) if active_here else 0.0)
        grads.append(
            0.0 if stopped or not active_here else -a * r + penalty * math.copysign(1.0, d)
        )
    output = KL_COV.fn(inputs, config)
    torch.testing.assert_close(
        inputs.masked(output.token_losses).detach(), torch.tensor(losses, dtype=torch.float64)
    )
    torch.testing.assert_close(
        gradient(KL_COV, config, leaf, inputs), torch.tensor(grads, dtype=torch.float64)
    )
    assert value(output.metrics["kl_cov_sel_frac"]) == pytest.approx(len(chosen) / active)


def test_pick_takes_the_first_and_never_more_than_there_are() -> None:
    _, inputs = random_inputs()
    inputs = dataclasses.replace(inputs, loss_mask=torch.arange(COUNT) < 10)
    order = -torch.arange(COUNT, dtype=torch.float64)
    for share, count in ((0.0, 1), (0.19, 1), (0.3, 3), (0.7, 7), (1.0, 10)):
        assert pick(inputs.loss_mask, order, share, inputs).nonzero().flatten().tolist() == list(
            range(count)
        )
    few = torch.arange(COUNT) < 2
    assert torch.equal(pick(few, order, 0.7, inputs), few)
    assert not pick(torch.zeros(COUNT, dtype=torch.bool), order, 0.7, inputs).any()


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_choice_is_that_of_a_micro_batch(name: str) -> None:
    """The exception to independence of the cut: halves choose for themselves. Order and padding do
    not matter to kl_cov."""
    loss = policy_losses.get(name)
    config = (
        ClipCovConfig(clip_cov_ratio=0.2, clip_cov_lb=0.02, clip_cov_ub=3.0)
        if name == "clip_cov"
        else KLCovConfig()
    )
    _leaf, inputs = random_inputs()

    def part(rows: torch.Tensor) -> LossInputs:
        changed = {
            f: getattr(inputs, f)[rows]
            for f in (
                "log_probs",
                "loss_mask",
                "loss_weights",
                "seq_ids",
                "advantages",
                "old_log_probs",
            )
        }
        return dataclasses.replace(inputs, **changed, rewards=None, rollout_log_probs=None)

    def run(parts: list[torch.Tensor]) -> float:
        return sum(
            float(total_loss(part(rows), loss, config, LossTerms()).loss.detach()) for rows in parts
        )

    everything = torch.arange(COUNT)
    inputs = dataclasses.replace(
        inputs, loss_mask=inputs.loss_mask & (inputs.log_ratio().abs() < 5)
    )  # no token outweighs all others
    full, halves = run([everything]), run([everything[: COUNT // 2], everything[COUNT // 2 :]])
    assert abs(full - halves) > 1e-3 * abs(full)
    active = everything[inputs.loss_mask]
    if name == "kl_cov":
        assert run([everything.flip(0)]) == pytest.approx(full, rel=1e-12)
        assert run([active]) == pytest.approx(full, rel=1e-12)
    padded = dataclasses.replace(
        inputs,
        **{
            f: torch.cat([getattr(inputs, f), getattr(inputs, f).new_zeros(7)])
            for f in (
                "log_probs",
                "loss_mask",
                "loss_weights",
                "seq_ids",
                "advantages",
                "old_log_probs",
            )
        },
    )
    assert float(total_loss(padded, loss, config, LossTerms()).loss.detach()) == pytest.approx(
        full, rel=1e-12
    )


@pytest.mark.parametrize("loss", [CLIP_COV, KL_COV], ids=["clip_cov", "kl_cov"])
def test_importance_weights_multiply_all_of_it(loss: Any) -> None:
    weights = torch.linspace(0.5, 2, COUNT, dtype=torch.float64)
    leaf, inputs = random_inputs()
    plain = gradient(loss, loss.config_type(), leaf, inputs)
    weighted = dataclasses.replace(inputs, importance_weights=weights)
    output = total_loss(weighted, loss, loss.config_type(), LossTerms())
    torch.testing.assert_close(torch.autograd.grad(output.loss, leaf)[0], weights * plain)
