"""Multiple choice: the option that an answer names last."""

from __future__ import annotations

import time

import pytest

from slime_like.rewards import choice

NAMED = {
    "Answer: B": "B",
    "**Answer:** B": "B",
    "**Final Answer: (B)**": "B",
    "The answer is (B).": "B",
    "the answer is **B**": "B",
    r"The answer is \boxed{B}": "B",
    r"Answer: $\boxed{\text{B}}$": "B",
    "Answer: A\nNo, wait.\nAnswer: B": "B",
    "<think>Answer: A</think>Answer: B": "B",
    r"So it is \boxed{B}": "B",
    r"So it is \boxed{\text{(B)}}": "B",
    "Answer: B) 4": "B",
    "B": None,
    "Option B is right": None,
    "The answer is Berlin": None,
    "Answer: I'd say B": None,
    r"\boxed{42}": None,
    "<think>Answer: B</think>": None,
    "": None,
}


@pytest.mark.parametrize("response", NAMED)
def test_the_option_that_is_named(response: str) -> None:
    named = NAMED[response]
    assert choice.named_option(response) == named
    assert choice.score(response, "B", {}) == float(named == "B")
    assert choice.score(response, "C", {}) == 0.0


def test_labels() -> None:
    assert choice.problem("C", {}) is None
    for label in (None, "", "c", "AB", 2, "Ä"):
        assert choice.problem(label, {}) is not None


@pytest.mark.parametrize("part", ["answer is ", "answer: \\boxed{", "*", "\\boxed{", "answer"])
def test_long_answers_take_linear_time(part: str) -> None:
    start = time.process_time()
    choice.score(part * (400_000 // len(part)), "A", {})
    assert time.process_time() - start < 2
