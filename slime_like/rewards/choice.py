"""Multiple choice: 1 if the option that the response names last is the label's letter.

An option is named as in "Answer: B", "the answer is (B)", "the answer is option B", or in the last
``\\boxed{B}``; an answer that only mentions letters names none. A letter with words behind it is no
option, unless they go on about one: "I think so" names none, "B because" does. Every step is linear
in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slime_like.rewards.gsm8k import last_box
from slime_like.rewards.label import missing_label

# behind a letter that is an option, not a word or a quantity: what ends it, or goes on about it
_END = (
    r"(?![\w'\u2019]|-\w)[^\S\n]{0,4}(?:[\n.,;:!?()\[\]{}$*\\\"\u201d\u2013\u2014-]|\Z"
    r"|(?:and|as|because|but|for|is|not|since|so|which|while|with)\b)"
)
_STYLED = r"(?:\\?(?:text|textbf|textrm|mathrm|mathbf)\{)?"
_NAMED = re.compile(
    r"(?i:\banswer)\b[^\w\n]{0,6}?(?::|(?i:\bis\b))\W{0,12}"  # Answer: **
    rf"(?:boxed\{{)?\W{{0,4}}{_STYLED}\W{{0,4}}(?:the\s)?"
    rf"(?:(?i:option|choice)\W{{1,4}}([A-Z])(?![\w'])|([A-Z])(?={_END}))"
)
# of a box: the letter, which the option's text may follow
_LETTER = re.compile(
    rf"[^A-Za-z]*{_STYLED}[^A-Za-z]*([A-Z])(?:[^A-Za-z]*|[)}}]*[.):]\}}?\s.*)", re.DOTALL
)


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
    named = [(match.end(), match[1] or match[2]) for match in _NAMED.finditer(text)]
    if (box := last_box(text)) and (letter := _LETTER.fullmatch(text[slice(*box)])):
        named.append((box[1], letter[1]))
    return max(named)[1] if named else None
