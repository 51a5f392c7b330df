"""The loss scale moves by megatron-core's rules, once a step for all parts of an optimizer."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # noqa: E402

from slime_like.megatron.loss_scale import (  # noqa: E402
    LossScale,
    loss_scale_of,
    loss_scale_state,
    share_loss_scale,
)


def config(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(
        fp16=True, lr=1.0, loss_scale_window=5, min_loss_scale=2.0, **{"initial_loss_scale": 64.0} | settings
    )  # fmt: skip


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_it_moves_like_megatron_cores(hysteresis: int) -> None:
    ours = LossScale(config(hysteresis=hysteresis))
    theirs = DynamicGradScaler(64.0, 2.0, 2.0, 0.5, 5, hysteresis)
    draw = random.Random(hysteresis)
    seen = set()
    for _ in range(400):
        overflow = draw.random() < draw.choice([0.02, 0.3])
        ours.settle(overflow=overflow)
        theirs.update(overflow)
        assert torch.equal(ours.scale, theirs.scale)
        assert torch.equal(ours.inv_scale, theirs.inv_scale)
        assert ours.values == [float(value) for value in theirs.state_dict().values()]
        seen.add(float(ours.scale))
    assert len(seen) > 4, "it moved"


def test_a_constant_one_stays() -> None:
    scale = LossScale(config(loss_scale=8.0))
    for overflow in (True, True, False) * 5:
        scale.settle(overflow=overflow)
    scale.restore([2.0, 1.0, 1.0])
    assert float(scale.scale) == 8


def test_its_state_is_saved_and_reset() -> None:
    scale = LossScale(config(hysteresis=1))
    scale.settle(overflow=True)
    scale.settle(overflow=False)
    again = LossScale(config())
    again.restore(scale.values)
    assert torch.equal(again.state, scale.state) and float(again.scale) == 32
    (state,) = loss_scale_state(SimpleNamespace(grad_scaler=again))
    again.reset()
    assert state.tolist() == [64, 0, 2], "the same tensor"


def test_parts_of_an_optimizer_share_one() -> None:
    parts = [
        SimpleNamespace(grad_scaler=DynamicGradScaler(64.0, 2.0, 2.0, 0.5, 5, 1)) for _ in "ab"
    ]
    optimizer = SimpleNamespace(chained_optimizers=parts)
    share_loss_scale(optimizer, config(hysteresis=1))
    parts[1].grad_scaler.update(True)  # what a part alone found does not move it
    scale = loss_scale_of(optimizer)
    assert scale is not None and parts[0].grad_scaler is parts[1].grad_scaler is scale
    scale.settle(overflow=True)
    assert float(parts[0].grad_scaler.scale) == 32
    without = SimpleNamespace(grad_scaler=None)
    share_loss_scale(without, config())
    assert loss_scale_of(without) is None
