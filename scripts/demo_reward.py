"""The demo's reward (`--custom-rm-path scripts/demo_reward.py:score`), and an example of one of
your own.

reasoning-gym's own scorer for `spell_backward` gives credit for every letter in its place, whatever
follows the word, so a policy learns to write on and never to stop. Here letters beyond the word
count as wrong.
"""

from __future__ import annotations

from typing import Any


def score(args: Any, sample: Any, **kwargs: Any) -> float:
    return letters_in_place(sample.label, sample.response)


def letters_in_place(word: str, response: str) -> float:
    """Fraction of letters in the right place, from 0 to 1; 1 for exactly the word."""
    expected = word.lower()
    answer = response.strip().lower()
    right = sum(a == b for a, b in zip(expected, answer))
    return right / max(len(expected), len(answer))
