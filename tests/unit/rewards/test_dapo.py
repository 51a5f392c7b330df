"""slime's reward dapo, on slime's own test cases."""

from __future__ import annotations

import pytest

from slime_like.rewards import dapo


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Long solution. Answer: 42", "42", 1),
        ("Answer: 41 was wrong.\nAnswer: 42", "42", 1),
        ("just a number 42", "42", -1),
        ("answer : $42$", "42.0", 1),
        ("Answer: x = 42 square", "42", 1),
        ("Answer: \\boxed{1,234,567}", "1234567", 1),
        ("Answer: 100 dollars<|im_end|>", 100, 1),
        ("Answer: \\text{43}", "42", -1),
        ("Answer: 42" + " " * 400, "42", -1),
    ],
)
def test_dapo(response, label, expected):
    assert dapo.score(response, label, {}) == expected


def test_dapo_of_a_label_without_a_number():
    assert dapo.problem("blue", {}) is not None and dapo.problem("12", {}) is None
    with pytest.raises(ValueError, match="no number"):
        dapo.score("Answer: 1", "blue", {})
