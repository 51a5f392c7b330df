"""The reward for an answer that is the label."""

from __future__ import annotations

import pytest

from slime_like.rewards import exact_match


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("yes", "yes", 1),
        (" yes\n", "yes ", 1),
        ("Yes", "yes", 0),
        ("7", 7, 1),
        ("7.0", 7, 0),
        ("", "", 1),
        ("yes yes", "yes", 0),
    ],
)
def test_exact_match(response, label, expected):
    assert exact_match.score(response, label, {}) == expected


def test_exact_match_without_a_label():
    with pytest.raises(ValueError, match="--label-key"):
        exact_match.score("x", None, {})
