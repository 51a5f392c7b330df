"""The critic's loss in float64 against a loop over tokens, and its gradient against finite
differences."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from slime_like.config import SettingsError
from slime_like.losses import ValueInputs, ValueLossConfig, value_loss
from slime_like.metrics.typed import Metric

NAN, INF = math.nan, math.inf
CONFIGS = [
    ValueLossConfig(),
    ValueLossConfig(value_clip=0.05, value_loss_scale=1.0),
    ValueLossConfig(value_clip=1e30),
]


def make(seed: int = 0, size: int = 64) -> ValueInputs:
    """Values moved by less and by more than the range, on either side of the return, and inactive
    tokens that hold anything."""
    g = torch.Generator().manual_seed(seed)
    old, returns = (torch.randn(size, generator=g, dtype=torch.float64) for _ in range(2))
    values = old + 0.3 * torch.randn(size, generator=g, dtype=torch.float64)
    mask = torch.rand(size, generator=g) > 0.25
    values[~mask], old[~mask] = NAN, INF
    returns[~mask] = -INF
    weights = torch.rand(size, generator=g, dtype=torch.float64)
    return ValueInputs(values.requires_grad_(), old, returns, mask, weights)


def by_loop(
    v: float, old: float, target: float, clip: float, scale: float
) -> tuple[float, float, bool, bool]:
    """(loss, its derivative by v, moved beyond the range, clipped branch in force) of one token."""
    beyond = abs(v - old) > clip
    clipped = old + max(-clip, min(clip, v - old))
    plain, bounded = (v - target) ** 2, (clipped - target) ** 2
    active = beyond and bounded > plain
    return scale * max(plain, bounded), 0.0 if active else 2 * scale * (v - target), beyond, active


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {
        name: float(m.value) / (1.0 if m.count is None else float(m.count))
        for name, m in metrics.items()
    }


def with_gradient(inputs: ValueInputs, config: ValueLossConfig) -> tuple[dict[str, float], Tensor]:
    output = value_loss(inputs, config)
    (gradient,) = torch.autograd.grad(output.loss, inputs.values)
    return numbers(output.metrics), gradient


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"clip {c.value_clip}")
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_formula(config: ValueLossConfig, seed: int) -> None:
    inputs = make(seed)
    total, gradient, beyond, active, moved = 0.0, [], [], [], []
    columns = (
        inputs.values,
        inputs.old_values,
        inputs.returns,
        inputs.loss_mask,
        inputs.loss_weights,
    )
    for v, old, target, on, weight in zip(*(column.tolist() for column in columns)):
        if not on:
            gradient.append(0.0)
            continue
        loss, slope, is_beyond, is_active = by_loop(
            v, old, target, config.value_clip, config.value_loss_scale
        )
        total += weight * loss
        gradient.append(weight * slope)
        beyond.append(is_beyond)
        active.append(is_active)
        moved.append(abs(v - old))
    got, got_gradient = with_gradient(inputs, config)
    torch.testing.assert_close(
        got_gradient, torch.tensor(gradient, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    assert got["value_loss"] == pytest.approx(total, rel=1e-12)
    assert got["value_clipfrac"] == pytest.approx(sum(beyond) / len(beyond))
    assert got["value_clip_active"] == pytest.approx(sum(active) / len(active))
    assert got["value_diff_abs"] == pytest.approx(sum(moved) / len(moved))
    if config.value_clip < 1:
        assert 0 < sum(active) < sum(beyond) < len(beyond), "all branches are met"
    else:
        assert not any(beyond)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"clip {c.value_clip}")
def test_gradcheck(config: ValueLossConfig) -> None:
    inputs = make(7)
    on = inputs.loss_mask
    old_values, returns = (x.detach()[on] for x in (inputs.old_values, inputs.returns))
    leaf = inputs.values.detach()[on].requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return value_loss(
            ValueInputs(values, old_values, returns, on[on], inputs.loss_weights[on]), config
        ).loss

    assert torch.autograd.gradcheck(loss, leaf)


def test_unmoved_values_are_plain_regression() -> None:
    """In the first optimizer step of a rollout nothing is clipped, and rounding does not make it
    look so."""
    returns, values = torch.randn(1000), torch.randn(1000)
    leaf = (values + 1e-8).requires_grad_()
    inputs = ValueInputs(
        leaf, values, returns, torch.ones(1000, dtype=torch.bool), torch.full((1000,), 1e-3)
    )
    got, gradient = with_gradient(inputs, ValueLossConfig())
    assert (got["value_clipfrac"], got["value_clip_active"]) == (0, 0)
    torch.testing.assert_close(gradient, 1e-3 * (values - returns), rtol=1e-6, atol=1e-9)


def test_a_token_without_a_return_has_no_loss_and_keeps_the_denominator() -> None:
    inputs = make(1)
    on = inputs.loss_mask.nonzero()[:3, 0]
    returns = inputs.returns.clone()
    returns[on] = NAN
    without = ValueInputs(
        inputs.values, inputs.old_values, returns, inputs.loss_mask, inputs.loss_weights
    )
    mask = inputs.loss_mask.clone()
    mask[on] = False
    masked = ValueInputs(
        inputs.values, inputs.old_values, inputs.returns, mask, inputs.loss_weights
    )
    (got, gradient), (expected, expected_gradient) = (
        with_gradient(x, ValueLossConfig()) for x in (without, masked)
    )
    assert got == expected and got["value_loss"] > 0
    assert torch.equal(gradient, expected_gradient) and not gradient[on].any()


def test_an_infinite_value_is_seen() -> None:
    """Only a return that is NaN leaves a token out: what the critic itself says wrongly must reach
    the gradient norm."""
    inputs = make(2)
    values = inputs.values.detach().clone()
    values[inputs.loss_mask.nonzero()[0]] = INF
    broken = ValueInputs(
        values.requires_grad_(),
        inputs.old_values,
        inputs.returns,
        inputs.loss_mask,
        inputs.loss_weights,
    )
    _, gradient = with_gradient(broken, ValueLossConfig(value_clip=1e30))
    assert not gradient.isfinite().all()


def test_without_an_active_token_the_loss_is_0_with_a_gradient() -> None:
    inputs = make(3)
    empty = ValueInputs(
        inputs.values,
        inputs.old_values,
        inputs.returns,
        torch.zeros_like(inputs.loss_mask),
        inputs.loss_weights,
    )
    output = value_loss(empty, ValueLossConfig())
    (gradient,) = torch.autograd.grad(output.loss, inputs.values)
    assert float(output.loss.detach()) == 0 and not gradient.any()


@pytest.mark.parametrize("pieces", [2, 5])
def test_any_cut_gives_the_same(pieces: int) -> None:
    inputs = make(4)
    full_one, gradient = with_gradient(inputs, ValueLossConfig())
    total, parts = 0.0, []
    columns = [
        x.detach().chunk(pieces)
        for x in (
            inputs.values,
            inputs.old_values,
            inputs.returns,
            inputs.loss_mask,
            inputs.loss_weights,
        )
    ]
    for values, *others in zip(*columns):
        got, part = with_gradient(
            ValueInputs(values.clone().requires_grad_(), *others), ValueLossConfig()
        )
        total += got["value_loss"]
        parts.append(part)
    assert total == pytest.approx(full_one["value_loss"], rel=1e-12)
    torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-12, atol=0)


def test_padded_rows_and_half_precision() -> None:
    inputs = make(5)
    columns = (
        inputs.values.detach(),
        inputs.old_values,
        inputs.returns,
        inputs.loss_mask,
        inputs.loss_weights,
    )
    flat = value_loss(ValueInputs(*columns), ValueLossConfig())
    padded = value_loss(ValueInputs(*(column.view(4, -1) for column in columns)), ValueLossConfig())
    assert float(flat.loss) == pytest.approx(float(padded.loss), rel=1e-12)
    low = [column if column.dtype == torch.bool else column.bfloat16() for column in columns]
    assert value_loss(ValueInputs(*low), ValueLossConfig()).loss.dtype == torch.float32


@pytest.mark.parametrize(
    "config",
    [
        {"value_clip": 0},
        {"value_loss_scale": -1.0},
        {"value_clip": NAN},
        {"value_clip": INF},
        {"value_clip": None},
        {"value_clip": "0.2"},
    ],
)
def test_illegal_settings(config: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(config))):
        ValueLossConfig(**config)
