"""How well a critic's values predict the returns, against sums written out."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from slime_like.advantages.values import value_metrics

NAN = math.nan


def test_against_plain_sums() -> None:
    """Inactive tokens hold anything; a return that is NaN is left out of what needs one."""
    g = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, generator=g) > 0.3 for n in (5, 1, 9, 4)]
    returns = [torch.randn(m.numel(), generator=g) for m in masks]
    values = [r + 0.5 * torch.randn(r.numel(), generator=g) + 0.2 for r in returns]
    masks[2][0], returns[2] = True, torch.full_like(returns[2], NAN)
    for value, target, mask in zip(values, returns, masks):
        value[~mask], target[~mask] = NAN, math.inf
    metrics = value_metrics(values, returns, masks)
    active = [
        (float(v), float(r))
        for vs, rs, ms in zip(values, returns, masks)
        for v, r, m in zip(vs, rs, ms)
        if m
    ]
    known = [(v, r) for v, r in active if not math.isnan(r)]
    assert len(known) < len(active)
    assert metrics["rollout/values_mean"] == pytest.approx(
        statistics.fmean(v for v, _ in active), rel=1e-6
    )
    assert metrics["rollout/values_abs"] == pytest.approx(
        statistics.fmean(abs(v) for v, _ in active), rel=1e-6
    )
    assert metrics["rollout/values_std"] == pytest.approx(
        statistics.pstdev(v for v, _ in active), rel=1e-5
    )
    assert metrics["rollout/returns_mean"] == pytest.approx(
        statistics.fmean(r for _, r in known), rel=1e-6
    )
    explained = 1 - statistics.pvariance([r - v for v, r in known]) / statistics.pvariance(
        [r for _, r in known]
    )
    assert metrics["rollout/explained_variance"] == pytest.approx(explained, rel=1e-4)
    assert metrics["rollout/values_nonfinite"] == 0


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1.0), (0.0, 0.0), (-1.0, -3.0)])
def test_explained_variance(factor: float, expected: float) -> None:
    """Perfect values, a constant (of any size: only differences count), and the wrong sign."""
    returns = torch.tensor([1.0, 2.0, 4.0, -3.0])
    metrics = value_metrics([factor * returns + 10], [returns], [torch.ones(4, dtype=torch.bool)])
    assert metrics["rollout/explained_variance"] == pytest.approx(expected, abs=1e-5)


def test_nothing_to_explain() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    assert "rollout/explained_variance" not in value_metrics(
        [torch.randn(3)], [torch.full((3,), 0.3)], [mask]
    )
    assert "rollout/explained_variance" not in value_metrics(
        [torch.randn(3)], [torch.full((3,), NAN)], [mask]
    )
    metrics = value_metrics(
        [torch.tensor([1.0, math.inf, NAN])], [torch.ones(3)], [torch.tensor([True, True, False])]
    )
    assert metrics["rollout/values_nonfinite"] == 1 and metrics["rollout/values_mean"] == 1
    empty = value_metrics([torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2, dtype=torch.bool)])
    assert empty == {"rollout/values_nonfinite": 0}
