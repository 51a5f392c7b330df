"""slime's reward f1, on slime's own test cases."""

from __future__ import annotations

import pytest

from slime_like.rewards import f1


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Paris is the capital", "Paris is the capital", 1),
        ("the brown fox", "a quick brown fox", 0.8),
        ("apple banana", "carrot date", 0),
        ("yes", "yes sir", 0),
        ("he said no", "no", 0),
        ("noanswer", "noanswer", 1),
        ("An apple, a day", "the apple day!", 1),
    ],
)
def test_f1(response, label, expected):
    assert f1.score(response, label, {}) == pytest.approx(expected, abs=1e-12)
