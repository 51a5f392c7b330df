"""Multiple choice of GPQA (Rein et al. 2023, arXiv 2311.12022), slime's ``gpqa``: 1 if the response
chooses the right option, by its letter or its text.

Metadata: ``choices`` (a list, or an object whose values count), ``valid_letters``,
``correct_letter``, ``correct_answer`` or ``answer_text``; each may be absent.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.rewards.label import missing_label

LETTERS = tuple(string.ascii_uppercase[:10])  # used if the row has neither letters nor choices
_CHOSEN = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # of the right letter alone: "answer choices" chooses no C
        r"(?:answer|option|choice)\s*(?:(?:is|:)\s*)?([A-Z])(?![A-Z])",
        r"([A-Z])\s*is\s*(?:the)?\s*correct",
    )
)
_ALONE = re.compile(r"\b([A-Z])\b")
_NO_WORD = re.compile(r"[^a-z0-9]+")


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    keys = ("correct_letter", "correct_answer", "answer_text")
    return None if any(map(metadata.get, keys)) else missing_label(label, metadata)


def score(response: str, label: object, metadata: Mapping[str, Any]) -> float:
    """1 for the correct letter, otherwise 0. Label: a letter, the 0-based index of a choice, or its
    text."""
    choices = _choices(metadata)
    letters = tuple(str(letter).upper() for letter in metadata.get("valid_letters") or ())
    letters = letters or (tuple(string.ascii_uppercase[: len(choices)]) if choices else LETTERS)
    answer = response.rpartition("</think>")[2]
    chosen = chosen_letter(answer, letters)
    right = _right_letter(label, metadata, choices, letters)
    if chosen is not None and right is not None:
        return float(chosen == right)
    texts = [metadata.get("correct_answer"), metadata.get("answer_text"), label]
    if right in letters and letters.index(right) < len(choices):
        texts.append(choices[letters.index(right)])
    plain = _plain(answer)
    return float(any(_plain(text) in plain for text in texts if _plain(text)))


def chosen_letter(answer: str, letters: Sequence[str]) -> str | None:
    """The letter that the answer names, otherwise its last standalone letter; None if neither is
    legal."""
    for pattern in _CHOSEN:
        if (match := pattern.search(answer)) is not None and match[1].upper() in letters:
            return match[1].upper()
    return next((letter for letter in reversed(_ALONE.findall(answer)) if letter in letters), None)


def _choices(metadata: Mapping[str, Any]) -> list[str]:
    choices = metadata.get("choices") or ()
    return list(map(str, choices.values() if isinstance(choices, Mapping) else choices))


def _right_letter(
    label: object, metadata: Mapping[str, object], choices: Sequence[str], letters: Sequence[str]
) -> str | None:
    letter = metadata.get("correct_letter")
    if isinstance(letter, str) and letter.strip():
        return letter.strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool):
        return letters[int(label)] if 0 <= label < len(letters) else None
    text = label.strip() if isinstance(label, str) else ""
    if text.upper() in letters:
        return text.upper()
    plain = [_plain(choice) for choice in choices]
    return letters[plain.index(_plain(text))] if text and _plain(text) in plain else None


def _plain(text: object) -> str:
    return "" if text is None else _NO_WORD.sub(" ", str(text).lower()).strip()
