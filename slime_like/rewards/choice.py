"""Multiple choice: 1 if the option that the response names last is the label's letter.

An option is named as in "Answer: B", "the answer is (B)", or in the last ``\\boxed{B}``; an answer
that only mentions letters names none. Every step is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slime_like.rewards.gsm8k import last_boxed
from slime_like.rewards.label import missing_label

_NAMED = re.compile(
    r"(?i:\banswer)\b[^\w\n]{0,6}?(?::|(?i:\bis\b))[^\w\n]{0,12}"  # Answer: **
    r"(?:boxed\{)?[^\w\n]{0,4}(?:(?:text|mathrm|mathbf)\{)?[^\w\n]{0,4}([A-Z])(?![\w'])"
)
_LETTER = re.compile(r"[^A-Za-z]*(?:\\(?:text|mathrm|mathbf)\{)?[^A-Za-z]*([A-Z])[^A-Za-z]*")


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    if reason := missing_label(label, metadata):
        return reason
    if isinstance(label, str) and len(label) == 1 and "A" <= label <= "Z":
        return None
    return f"the label is {str(label)[:40]!r}, must be the letter of an option, from A to Z"


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """1 for the label's letter, otherwise 0."""
    return float(named_option(response) == label)


def named_option(response: str) -> str | None:
    """The letter that the text after the last ``</think>`` names last; None without any."""
    text = response.rpartition("</think>")[2]
    named = _NAMED.findall(text)
    if named:
        return str(named[-1])
    boxed = _LETTER.fullmatch(last_boxed(text) or "")
    return None if boxed is None else boxed[1]
