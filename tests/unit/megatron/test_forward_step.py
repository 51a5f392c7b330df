"""The scale: what megatron-core's schedule and DDP divide by is undone exactly. Whole steps:
tests/dist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_patches

megatron_patches.apply()

from megatron.core.pipeline_parallel import schedules  # noqa: E402

from slime_like.megatron import forward_step  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_probe() -> Any:
    forward_step.schedule_context_parallel_factor.cache_clear()
    yield
    forward_step.schedule_context_parallel_factor.cache_clear()


def layout(dp: int, cp: int) -> Any:
    return SimpleNamespace(dp_size=dp, cp_size=cp)


def through_the_schedule(loss: float, num_microbatches: int, cp: int) -> float:
    """What the installed schedule makes of a micro-batch's loss that comes with the count 1."""
    result, _ = schedules.forward_step_calc_loss(
        model=SimpleNamespace(),
        output_tensor=torch.tensor(loss),
        loss_func=lambda output: (output.clone(), torch.ones((), dtype=torch.int), {}),
        config=SimpleNamespace(calculate_per_token_loss=False, timers=None),
        vp_stage=None,
        collect_non_loss_data=False,
        num_microbatches=num_microbatches,
        forward_data_store=[],
        cp_group_size=cp,
        is_last_stage=True,
    )
    return float(result)


@pytest.mark.parametrize(
    ("num_microbatches", "dp", "cp"), [(1, 1, 1), (4, 1, 1), (3, 2, 1), (4, 2, 2), (1, 8, 3)]
)
def test_schedule_and_data_parallel_average_are_undone(
    num_microbatches: int, dp: int, cp: int
) -> None:
    """Every rank has this many partial losses of 0.5, and DDP averages gradients over dp * cp equal
    ranks: the sum of all must come out."""
    scale = forward_step.gradient_scale(layout(dp, cp), num_microbatches)
    of_a_rank = sum(
        through_the_schedule(0.5 * scale, num_microbatches, cp) for _ in range(num_microbatches)
    )
    averaged = sum([of_a_rank] * dp * cp) / (dp * cp)
    assert averaged == pytest.approx(0.5 * num_microbatches * dp * cp)


def test_an_older_schedule_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.12 multiplied by the context-parallel size."""
    real = schedules.forward_step_calc_loss

    def times_cp(**keywords: Any) -> Any:
        loss, tokens = real(**keywords)
        return loss * keywords["cp_group_size"], tokens

    monkeypatch.setattr(schedules, "forward_step_calc_loss", times_cp)
    assert forward_step.schedule_context_parallel_factor() > 1
    assert forward_step.gradient_scale(layout(2, 4), 3) == 3 * 2


def test_an_unknown_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = schedules.forward_step_calc_loss

    def doubled(**keywords: Any) -> Any:
        loss, tokens = real(**keywords)
        return loss * 2, tokens

    monkeypatch.setattr(schedules, "forward_step_calc_loss", doubled)
    with pytest.raises(RuntimeError, match=r"unknown factor 2\.0"):
        forward_step.gradient_scale(layout(1, 1), 1)
