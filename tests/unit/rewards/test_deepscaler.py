"""slime's reward deepscaler, on slime's own test cases."""

from __future__ import annotations

import pytest

from slime_like.rewards import deepscaler


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Let me see. \\boxed{99}</think>Final: \\boxed{42}", "42", 1),
        ("Scratch \\boxed{9}###Response\\boxed{42}", "42", 1),
        ("\\boxed{42}", "42", 0),
        ("plain</think>no box", "42", 0),
        ("</think>\\boxed{42}", "", 0),
        ("</think>\\boxed{42}", 42, 1),
        ("</think>\\boxed{42}", 42.0, 1),
        ("</think>\\boxed{42}", "\\boxed{42}", 1),
        ("</think>\\boxed{43}", "42", 0),
        ("</think>\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("</think>\\boxed{1,000}", "1000", 1),
        ("</think>\\boxed{\\text{blue}}", "\\text{blue}", 1),
    ],
)
def test_deepscaler(response, label, expected):
    assert deepscaler.score(response, label, {}) == expected
