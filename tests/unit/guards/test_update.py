"""Guards of updates: limits, patience, and errors that a launcher prints as one message."""

from __future__ import annotations

import math

import pytest

from slime_like.guards.finite import GuardError
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
    """Values have their own size: above 1 the limit is relative to it."""
    for size in (0.0, 1.0, 50.0):
        bound = limit * max(1.0, size)
        check_old_values(bound, values_abs=size, same_packing=same_packing, half_precision=half)
        for value in (1.01 * bound, math.inf, math.nan):
            with pytest.raises(GuardError, match="do not compute the same model"):
                check_old_values(
                    value, values_abs=size, same_packing=same_packing, half_precision=half
                )


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
