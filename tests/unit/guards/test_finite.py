"""Numbers that are not finite are named."""

from __future__ import annotations

import math

import pytest
import torch

from slime_like.errors import RunError
from slime_like.guards.finite import GuardError, check_finite, first_non_finite, non_finite_losses

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


def test_a_gate_is_a_run_error() -> None:
    assert issubclass(GuardError, RunError)
