"""Multiple choice: GPQA Diamond (Rein et al. 2023, arXiv 2311.12022) and MMLU-Pro (Wang et al.
2024, arXiv 2406.01574)."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence

from slime_like.standard_sets.base import (
    NotThisSet,
    Problem,
    Row,
    StandardSet,
    column,
    standard_sets,
    texts,
)

_TEMPLATE = """\
{{ question }}

{% for letter, option in options %}{{ letter }}) {{ option }}
{% endfor %}
Exactly one option is right. Think step by step, and end with a line "Answer: X", where X is its \
letter."""
_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def gpqa(row: Row) -> Problem:
    """A row with a question, the correct answer and three others, which come in an order that only
    the question decides: in the file the correct one is always the first."""
    question = column(row, "Question")
    answers = [column(row, name).strip() for name in _GPQA]
    digest = hashlib.sha256(question.encode()).digest()
    order = sorted(range(len(answers)), key=lambda i: hashlib.sha256(digest + bytes([i])).digest())
    return _problem(question.strip(), [answers[i] for i in order], order.index(0))


def mmlu_pro(row: Row) -> Problem:
    """A row with a question, up to ten options and the letter of the right one."""
    options, letter = texts(row, "options"), column(row, "answer")
    letters = string.ascii_uppercase[: len(options)]
    if len(letter) != 1 or letter not in letters:
        raise NotThisSet(f"'answer' is {letter!r}, must be one of the letters {letters}")
    return _problem(column(row, "question"), options, letters.index(letter))


def _problem(question: str, options: Sequence[str], right: int) -> Problem:
    letters = string.ascii_uppercase[: len(options)]
    shown = {"question": question, "options": list(zip(letters, options))}
    return Problem(shown, letters[right], solution=f"Answer: {letters[right]}")


standard_sets.add(
    "gpqa-diamond",
    StandardSet(
        "questions of graduate science; 198",
        gpqa,
        columns=("Question", *_GPQA),
        names=("question", "options"),
        template=_TEMPLATE,
        reward="choice",
        files=("gpqa_diamond.csv", "gpqa_diamond.jsonl", "*diamond*.parquet"),
        hub=("Idavidrein/gpqa",),
    ),
)
standard_sets.add(
    "mmlu-pro",
    StandardSet(
        "questions of 14 subjects with up to ten options; 12032",
        mmlu_pro,
        columns=("question", "options", "answer"),
        names=("question", "options"),
        template=_TEMPLATE,
        reward="choice",
        files=("data/test-*.parquet", "test-*.parquet", "test.jsonl"),
        hub=("TIGER-Lab/MMLU-Pro",),
    ),
)
