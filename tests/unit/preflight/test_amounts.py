"""Amounts of a preflight, as people read them."""

from __future__ import annotations

import pytest

from slime_like.preflight.report import amount


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.87e-07, "less than 0.01"),
        (0.0, "0"),
        (0.0123, "0.0123"),
        (4.567, "4.57"),
        (12345.6, "12,346"),
    ],
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text
