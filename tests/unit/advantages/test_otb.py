"""The optimal token baseline against a loop over tokens, in float64, and against verl's numbers.
Several ranks: tests/dist/test_whitening.py; through train.py: tests/e2e/test_estimators.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slime_like.advantages import (
    AdvantageSettings,
    Outcomes,
    estimate_advantages,
    token_energies,
)
from tests.unit.advantages.token_cases import (
    GROUPS,
    REWARDS,
    energies_of,
    estimate,
    flat,
    outcomes,
    penalised,
    returns_by_loop,
    samples,
)


def otb_by_loop(
    masks: Sequence[Tensor],
    rewards: Sequence[list[float]],
    energies: Sequence[Tensor],
    gamma: float,
) -> list[list[float]]:
    """The t-th active tokens of a group against each other, each weighed by what its response has
    gathered up to it."""
    returns = [returns_by_loop(r, m.tolist(), gamma) for r, m in zip(rewards, masks)]
    active = [mask.nonzero().flatten().tolist() for mask in masks]
    advantages = [[0.0] * mask.numel() for mask in masks]
    for i in range(len(masks)):
        peers = [j for j in range(len(masks)) if GROUPS[j] == GROUPS[i]]
        for place, t in enumerate(active[i]):
            weights, weighted = 0.0, 0.0
            for j in peers:
                if place < len(active[j]):
                    gathered = sum(float(energies[j][s]) for s in active[j][: place + 1])
                    weights += gathered
                    weighted += gathered * returns[j][active[j][place]]
            advantages[i][t] = returns[i][t] - weighted / weights
    return advantages


@pytest.mark.parametrize("name", ["otb", "optimal_token_baseline"])
@pytest.mark.parametrize(("gamma", "coef"), [(1.0, 0.0), (0.9, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_token_baseline(name: str, gamma: float, coef: float, seed: int) -> None:
    masks, kl = samples(seed)
    got = estimate(AdvantageSettings(name, gamma=gamma, kl_coef=coef), masks, kl)
    rewards = [penalised(r, m, k, coef) for r, m, k in zip(REWARDS, masks, kl)]
    expected = otb_by_loop(masks, rewards, energies_of(masks), gamma)
    assert flat(got.values) == pytest.approx(flat(expected), rel=1e-5, abs=1e-6)
    assert any(flat(got.values))


def test_an_energy_is_the_squared_gradient_by_the_logits() -> None:
    logits = torch.tensor([[0.3, -2.0, 1.0, 0.1], [9.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    logits.requires_grad_()
    log_p, expected = logits.log_softmax(-1), []
    for row, token in enumerate((2, 0)):
        (gradient,) = torch.autograd.grad(log_p[row, token], logits, retain_graph=True)
        expected.append(float(gradient.square().sum()))
    sampled, squares = log_p[[0, 1], [2, 0]], log_p.exp().square().sum(-1)
    (energies,) = token_energies([sampled], [squares], [torch.ones(2, dtype=torch.bool)])
    assert energies.tolist() == pytest.approx(expected, rel=1e-12)
    certain = token_energies(
        [torch.zeros(1)], [torch.full((1,), 0.9999999)], [torch.ones(1).bool()]
    )
    assert certain[0].tolist() == [0], "not below"


def test_otb_gives_exactly_nothing_where_rewards_are_equal_and_needs_energies() -> None:
    masks, _ = samples(2)
    got = estimate(
        AdvantageSettings("otb"), masks, rewards=[0.1, 0.1, 1 / 3, 1 / 3, 1 / 3, 2.0, 2.0]
    )
    assert not any(flat(got.values))
    assert got.metrics["reward/zero_spread_group_frac"] == 1
    with pytest.raises(ValueError, match="needs the energy of every token"):
        estimate_advantages(
            AdvantageSettings("otb"), outcomes(masks), local_indices=range(7), masks=masks
        )


def test_the_numbers_of_verl() -> None:
    """Results of tir_optimal_token_baseline (January 2026) with masked tokens and responses of
    different lengths, without its special case for the end of the longest."""
    masks = [torch.tensor([c == "1" for c in row]) for row in ("11011", "01100", "10110", "11100")]
    probs = [
        [0.9, 0.5, 0.1, 0.2, 0.7],
        [0.3, 0.6, 0.99, 0.5, 0.5],
        [0.05, 0.5, 0.8, 0.4, 0.9],
        [0.25, 0.75, 0.5, 0.1, 0.1],
    ]
    squares = [
        [0.82, 0.4, 0.3, 0.25, 0.55],
        [0.2, 0.45, 0.981, 0.5, 0.4],
        [0.1, 0.4, 0.66, 0.3, 0.83],
        [0.3, 0.6, 0.5, 0.2, 0.2],
    ]
    energies = token_energies(
        [torch.tensor(row, dtype=torch.float64).log() for row in probs],
        [torch.tensor(row, dtype=torch.float64) for row in squares],
        masks,
    )
    batch = Outcomes(
        torch.tensor([1.0, -0.5, 2.0, 0.25]),
        torch.zeros(4, dtype=torch.int64),
        torch.tensor([4, 2, 3, 3]),
    )
    got = estimate_advantages(
        AdvantageSettings("otb"), batch, local_indices=range(4), masks=masks, energies=energies
    )
    expected = [
        [-0.0120772898, -0.00323070694, 0.0, -0.120567373, 0.0],
        [0.0, -1.51207729, -1.50323071, 0.0, 0.0],
        [0.98792271, 0.0, 0.996769293, 0.879432627, 0.0],
        [-0.76207729, -0.753230707, -0.870567373, 0.0, 0.0],
    ]
    assert flat(got.values) == pytest.approx(flat(expected), abs=2e-7)
