"""The reward for mathematics: answers that are equal."""

from __future__ import annotations

import pytest

from slime_like.rewards import math


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1),
        ("\\boxed{\\frac{1}{2}}", "\\frac12", 1),
        ("\\boxed{0.5}", "$\\frac{1}{2}$", 1),
        ("so $x^2+2x+1$", "(x+1)^2", 1),
        ("\\boxed{x+1}", "1+x", 1),
        ("\\boxed{3}", "\\boxed{3}", 1),
        ("\\boxed{3}, and 4 is wrong", "4", 0),
        ("I first got \\boxed{99}. But checking again, the answer is \\boxed{42}.", "42", 1),
        ("I first got \\boxed{99}. But checking again, the answer is \\boxed{42}.", "99", 0),
        ("\\boxed{1} and \\boxed{2}", "2", 1),
        ("\\boxed{7} or \\boxed{8", "7", 1),
        ("\\boxed{\\boxed{7}}", "7", 1),
        ("\\boxed{\\frac{1}{\\sqrt{2}}} not \\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt3}2", 1),
        ("<think>\\boxed{1}</think> It is \\boxed{2}.", "2", 1),
        ("<think>\\boxed{1}</think> It is 2.", "2", 1),
        ("<think>\\boxed{1}</think> It is 2.", "1", 0),
        ("<think>so \\boxed{2}", "2", 1),
        ("\\boxed{} then \\boxed{ 5 }", "5", 1),
        ("the answer is 1,234", "1234", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
        ("\\boxed{7}", 7, 1),
        ("\\boxed{7}", 8, 0),
        ("\\boxed{32348}", "\\$32,\\!348", 1),
        ("\\boxed{\\$18.90}", "\\$18.90", 1),
        ("\\boxed{18.9}", "$18.90$", 1),
        ("I do not know", "7", 0),
        ("", "7", 0),
    ],
)
def test_math(response, label, expected):
    pytest.importorskip("math_verify")
    assert math.score(response, label, {}) == expected


def test_math_label_that_cannot_be_read():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the label is no mathematical expression"):
        math.score("7", "", {})
