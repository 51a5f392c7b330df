"""The reward of the learning tests that are not graded by a built-in one (`--custom-rm-path
tests/learning/rewards.py:right_prefix`)."""

from __future__ import annotations

from typing import Any


def right_prefix(args: Any, sample: Any) -> float:
    """Share of the label, and of its end, that the response has before its first mistake."""
    return score(sample.response, sample.label, ended=sample.status == "completed")


def score(response: str, label: str, *, ended: bool) -> float:
    """The reward of one response.

    Args:
        response: the characters before the end-of-text token.
        label: the characters that are right.
        ended: the response ends there, in place of being cut at the limit of length.

    Returns:
        Between 0 and 1: the characters that are right before the first that is not, over the
        characters of the label and one for its end. 1 is the label and then the end.
    """
    right = 0
    for ours, theirs in zip(response, label):
        if ours != theirs:
            break
        right += 1
    exact = ended and response == label
    return (right + exact) / (len(label) + 1)
