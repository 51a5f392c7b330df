"""Guards: limits, NaN, patience, and errors that a launcher prints as one message."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.errors import RunError
from slime_like.guards.finite import GuardError, check_finite, first_non_finite, non_finite_losses
from slime_like.guards.update import (
    SkippedStepGuard,
    check_initial_kl,
    check_old_log_probs,
    check_old_values,
)


@pytest.mark.parametrize(
    ("same_packing", "half", "limit"),
    [(True, False, 1e-8), (True, True, 1e-8), (False, False, 1e-5), (False, True, 1e-3)],
)
def test_old_log_probs(same_packing: bool, half: bool, limit: float) -> None:
    check_old_log_probs(0.0, same_packing=same_packing, half_precision=half)
    check_old_log_probs(limit, same_packing=same_packing, half_precision=half)
    for value in (1.01 * limit, math.inf, math.nan):
        with pytest.raises(GuardError, match="do not compute the same model"):
            check_old_log_probs(value, same_packing=same_packing, half_precision=half)


@pytest.mark.parametrize(
    ("same_packing", "half", "limit"),
    [(True, False, 1e-8), (True, True, 1e-8), (False, False, 1e-5), (False, True, 1e-3)],
)
def test_old_values(same_packing: bool, half: bool, limit: float) -> None:
    """Values have a size of their own: above 1 the limit is relative to it."""
    for size in (0.0, 1.0, 50.0):
        bound = limit * max(1.0, size)
        check_old_values(bound, values_abs=size, same_packing=same_packing, half_precision=half)
        for value in (1.01 * bound, math.inf, math.nan):
            with pytest.raises(GuardError, match="do not compute the same model"):
                check_old_values(
                    value, values_abs=size, same_packing=same_packing, half_precision=half
                )


MASKS = [torch.tensor([True, False, True]), torch.tensor([False, True, True])]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_number_that_is_not_finite_is_named(value: float) -> None:
    fine = [
        torch.tensor([1.0, value, 2.0]),
        torch.tensor([value, 1.0, 2.0]),
    ]  # masked ones are nobody's
    columns = {"old log-prob": None, "advantage": fine, "importance weight": [None, fine[1]]}
    assert first_non_finite(columns, MASKS, ["7", "8"]) is None
    check_finite(columns, MASKS, ["7", "8"], when="now")
    broken = [fine[0], torch.tensor([0.0, 1.0, value])]
    found = first_non_finite({**columns, "value of the critic": broken}, MASKS, ["7", "8"])
    assert found is not None
    assert (found.what, found.sample, found.token, found.rank) == ("value of the critic", "8", 2, 0)
    with pytest.raises(
        GuardError, match=f"now: the value of the critic of sample 8 is {value:g} at token 2"
    ):
        check_finite({**columns, "value of the critic": broken}, MASKS, ["7", "8"], when="now")


def test_losses_that_are_not_finite() -> None:
    fine = {"loss": 1.0, "kl": 0.0, "ratio_max": math.inf}
    assert non_finite_losses(fine) == []
    assert non_finite_losses({**fine, "kl_loss": math.nan, "value_loss": -math.inf}) == [
        "kl_loss nan",
        "value_loss -inf",
    ]


@pytest.mark.parametrize(("half", "limit"), [(False, 1e-8), (True, 1e-3)])
def test_initial_kl(half: bool, limit: float) -> None:
    for value in (0.0, limit, -limit):
        check_initial_kl(value, half_precision=half)
    for value in (1.01 * limit, -1.01 * limit, math.nan):
        with pytest.raises(GuardError, match="were loaded differently"):
            check_initial_kl(value, half_precision=half)


def test_skipped_steps_in_a_row() -> None:
    assert (SkippedStepGuard(patience=2, owner="critic's ").check(True, math.nan) or "").startswith(
        "critic's optimizer step skipped"
    )
    gate = SkippedStepGuard(patience=2)
    assert gate.check(False, 1.0) is None
    assert "NaN (1 in a row, 1 in total)" in (gate.check(True, math.nan) or "")
    assert gate.check(False, 1.0) is None
    assert "infinite (1 in a row, 2 in total)" in (gate.check(True, math.inf) or "")
    with pytest.raises(
        GuardError, match=r"2 in a row, 3 in total\); see --max-consecutive-skipped-steps"
    ):
        gate.check(True, math.nan)
    assert gate.total == 3


def test_a_gate_is_a_run_error() -> None:
    assert issubclass(GuardError, RunError)
