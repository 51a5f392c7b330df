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
    r"\boxed{\textbf{(B)}}": "B",
    r"\boxed{\textrm{B}}": "B",
    r"The answer is \textbf{B}": "B",
    r"At first the answer is A, but \boxed{B. Paris}": "B",
    r"\boxed{(B) Paris, France}": "B",
    r"\boxed{\text{B: A. and C.}}": "B",
    r"\boxed{U.S. law}": None,
    r"\boxed{Because. Of}": None,
    "Answer: B) 4": "B",
    "Answer: \nB": "B",
    "The answer is:\n\n**B**": "B",
    "The correct answer is option C.": "C",
    "Answer: Choice (B)": "B",
    r"The answer is $\mathbf{C}$": "C",
    "The answer is B because 2 > 1": "B",
    "The answer is A, since 2 > 1": "A",
    "The answer is A because 2 > 1": "A",
    r"If the answer is A then x=2, contradiction. So \boxed{C}.": "C",
    "At first the answer is A, it seems. But no.\n\nFinal: \\boxed{B}": "B",
    r"First \boxed{A}. No, the answer is B": "B",
    r"The answer is B. Its area is \boxed{42}": "B",
    "The answer is B, and \\boxed{C": "B",
    "Answer: I think it is B.": None,
    "The answer is A bit tricky": None,
    "The answer is:\n\nA square": None,
    "Answer: X-ray": None,
    "Answer: B = 4": None,
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
    assert choice.score(response, "D", {}) == 0.0


def test_labels() -> None:
    assert choice.problem("C", {}) is None
    for label in (None, "", "c", "AB", 2, "Ä"):
        assert choice.problem(label, {}) is not None


@pytest.mark.parametrize(
    "part", ["answer is ", "answer: \\boxed{", "*", "\\boxed{", "answer", "answer is A    "]
)
def test_long_answers_take_linear_time(part: str) -> None:
    start = time.process_time()
    choice.score(part * (400_000 // len(part)), "A", {})
    assert time.process_time() - start < 2
