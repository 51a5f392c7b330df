"""The reward of DAPO (arXiv 2503.14476), slime's ``dapo``: 1 if the last ``Answer:`` near the end
of the response is the label, an integer; otherwise -1."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slime_like.rewards.gsm8k import last_boxed
from slime_like.rewards.label import missing_label

GRADED_LENGTH = 300  # number of last characters of a response that are graded
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|mbox|overline|mathrm)\{([^{}]*)\}")
_SIGNS = re.compile(
    r"\\[,;! ]|\\\$|[$\s\"]|\{,\}|\^\\circ|\^\{\\circ\}|<\|im_end\|>|<\|endoftext\|>"
)
_WORDS = re.compile(
    r"(?:an?|square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents"
    r"|degrees|cm|gm|pounds|meters|meals|edges|students)(?![a-z])"
)


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None."""
    if reason := missing_label(label, metadata):
        return reason
    return (
        None if _integer(str(label)) is not None else f"the label is no number: {str(label)!r:.80}"
    )


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """1 for a correct answer, -1 otherwise. Raises ValueError if the label is not a number.
    Decimals of a label are truncated, like in slime."""
    if (expected := _integer(str(label))) is None:
        raise ValueError(problem(label, metadata))
    answers = _ANSWER.findall(response[-GRADED_LENGTH:])
    return 1.0 if answers and plain_answer(answers[-1]) == str(expected) else -1.0


def plain_answer(text: str) -> str:
    """The part after the last ``=``, without LaTeX markup, units and spaces."""
    text = text.rpartition("=")[2]
    boxed = last_boxed(text)
    text = _TEXT.sub(r"\1", text if boxed is None else boxed)
    text = _SIGNS.sub("", _WORDS.sub("", text)).removesuffix(".")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def _integer(label: str) -> int | None:
    try:
        return int(float(plain_answer(label)))
    except (ValueError, OverflowError):
        return None
