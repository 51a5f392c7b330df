"""The reward of the learning tests that are not graded by a built-in one (`--custom-rm-path
tests/learning/rewards.py:right_prefix`)."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

VOCABULARY = "EPU0123456789,:S"  # a token's number: its place here. E: end, S: separator


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
    right = _right(response, label)
    exact = ended and response == label
    return (right + exact) / (len(label) + 1)


def digit_completion(args: Any, sample: Any) -> list[float]:
    """The reward of verl's digit completion: a number for each token of the response."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    ended = sample.status == "completed"
    response = "".join(VOCABULARY[token] for token in (tokens[:-1] if ended else tokens))
    return digit_rewards(response, sample.label, ended=ended)


def digit_rewards(response: str, label: str, *, ended: bool) -> list[float]:
    """The rewards of the characters of a response, and of its end.

    Each character before the first mistake has 1 / (len(label) + 1), those after it have 0. The end
    has what the character before it has, so that who ends early loses only what is left out; the
    end of an empty response has 1 where nothing is asked, else 0.
    """
    right = _right(response, label)
    rewards = [1.0 / (len(label) + 1)] * right + [0.0] * (len(response) - right)
    if ended:
        rewards.append(rewards[-1] if response else float(not label))
    return rewards


def _right(response: str, label: str) -> int:
    """Characters before the first mistake."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(response, label))))
