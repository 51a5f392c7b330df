"""Final numbers of grade-school problems (GSM8K, Cobbe et al. 2021, arXiv 2110.14168): 1 if they
are equal, otherwise 0.

Every step is linear in the length of the text, so this reward needs no deadline.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from decimal import Decimal

from slime_like.rewards.label import missing_label

# A sign belongs to a number only if no operand precedes it ("7-4" has the numbers 7 and 4).
# Thousands separators: groups of three digits.
_NUMBER = re.compile(
    r"((?<![\w.)])[-\u2212])?\$?(\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
_MARKED = re.compile(r"####([^\n]*)")
_PROSE = re.compile(r"[.:)]\s*[^\W\d]")
_BOXED = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|\\[{}]|[{}]")


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    if reason := missing_label(label, metadata):
        return reason
    return _no_number(label) if label_number(str(label)) is None else None


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """1 for the correct number, otherwise 0. Label: the number after ``####``, or a bare number.
    Raises ValueError for a label without a number."""
    expected = label_number(str(label))
    if expected is None:
        raise ValueError(_no_number(label))
    return float(response_number(response) == expected)


@functools.lru_cache(maxsize=256)  # the samples of a group share their label
def label_number(label: str) -> Decimal | None:
    """The number after the last ``####`` of a label, or without that marker its last number."""
    marked = _marked_number(label)
    return marked if marked is not None else _last_number(label)


def response_number(response: str) -> Decimal | None:
    """The answer of a response: the last ``#### x``, otherwise the last ``\\boxed{x}``, otherwise
    its last number."""
    marked = _marked_number(response, headings=True)
    if marked is not None:
        return marked
    boxed = last_boxed(response)
    return _last_number(response if boxed is None else boxed)


def last_boxed(text: str) -> str | None:
    """Content of the last closed ``\\boxed{...}``, with balanced braces (``\\{`` and ``\\}`` do not
    count); the innermost of nested boxes; None without a box. Linear in the length of the text."""
    box = last_box(text)
    return None if box is None else text[slice(*box)]


def last_box(text: str) -> tuple[int, int] | None:
    """Start and end of what `last_boxed` returns."""
    if _BOXED not in text:
        return None
    best = (-1, -1)
    opened: list[int] = []  # start of each open brace's content; -1 if it is not a box
    for match in _BRACE.finditer(text):
        if match[0] == "}" and opened:
            best = max(best, (opened.pop(), match.start()))
        elif match[0] in ("{", _BOXED):
            opened.append(match.end() if match[0] == _BOXED else -1)
    return None if best[0] < 0 else best


def _no_number(label: object) -> str:
    return f"the label holds no number: {str(label)[:80]!r}"


def _marked_number(text: str, *, headings: bool = False) -> Decimal | None:
    """The first number on the line after ``####``; of several such lines, the last one with a
    number. headings: Lines may be headings of Markdown, whose numbers do not count."""
    for line in map(_plain, reversed(_MARKED.findall(text))):
        match = _NUMBER.search(line)
        if match and not (headings and _is_heading(line, match)):
            return _value(match)
    return None


def _is_heading(line: str, number: re.Match[str]) -> bool:
    """Whether a line is like "Step 1: we add" or "1. Addition", and not "The answer is 18"."""
    before = line[: number.start()]
    has_words = any(map(str.isalpha, before))
    names_answer = "answer" in before.lower() or "total" in before.lower() or "=" in before
    return (has_words and not names_answer) or _PROSE.match(line, number.end()) is not None


def _last_number(text: str) -> Decimal | None:
    last = None
    for match in _NUMBER.finditer(_plain(text)):
        last = match
    return None if last is None else _value(last)


def _plain(text: str) -> str:
    """Remove LaTeX notation of thousands commas and dollar signs."""
    return text.replace("{,}", ",").replace(",\\!", ",").replace("\\$", "$")


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match[2].replace(",", ""))
    return -number if match[1] else number
