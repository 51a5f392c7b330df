"""Mathematical equivalence by math-verify: 1 if the response's answer equals the label, otherwise
0.

math-verify limits its time by SIGALRM, which only works in a main thread and cannot stop long
native calls. Its limits are disabled here; this reward runs in a worker process with a deadline
(`grader.py`)."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping

from slime_like.rewards import big_numbers
from slime_like.rewards.gsm8k import last_boxed
from slime_like.rewards.label import missing_label

_DOLLAR = re.compile(r"(?<!\\)\$")
_MAX_PROSE = 5000  # characters
_MAX_DEPTH = 50  # open brackets


def prepare() -> None:
    """Import the library and parse once, so that neither the import nor the parser's tables count
    towards a sample's deadline."""
    _extraction()
    big_numbers.bound()
    # Suppress its once-per-process warning that its own time limits are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    score("$x + 1$", r"\frac{1}{2}", {})


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None. Unparsable labels are only detected in
    grading, because parsing is slow."""
    if reason := missing_label(label, metadata):
        return reason
    return None if str(label).strip() else "the label (--label-key) is empty"


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """1 for an equivalent answer, otherwise 0. Label: LaTeX or a plain expression, with or without
    ``$`` or ``\\boxed{}``. Raises ValueError for an unparsable label."""
    from math_verify import parse, verify

    text = str(label)
    marked = "\\boxed" in text or _DOLLAR.search(text)  # \$5 is an amount of money
    gold = [] if marked else parse(f"${text}$", parsing_timeout=None)
    gold = gold or parse(text, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the label is no mathematical expression: {text[:80]!r}")
    answer_text = final_answer(response)
    if is_too_long(answer_text):
        return 0.0
    answer = parse(answer_text, extraction_config=_extraction(), parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def equal(answer: str, truth: str) -> bool:
    """Whether two expressions without box or dollar signs are equivalent; False if one is
    unparsable."""
    from math_verify import parse, verify

    if is_too_long(answer):
        return False
    gold = parse(f"${truth}$", parsing_timeout=None)
    parsed = parse(f"${answer}$", parsing_timeout=None)
    return bool(gold and parsed and verify(gold, parsed, timeout_seconds=None))


def final_answer(response: str) -> str:
    """The part of the response to grade: the last ``\\boxed{...}`` after the last ``</think>``, or
    without a box the end of that part. Earlier boxes are ignored, as in other graders."""
    text = response.rpartition("</think>")[2]
    boxed = last_boxed(text)
    return text[-_MAX_PROSE:] if boxed is None else f"\\boxed{{{boxed}}}"


def is_too_long(answer: str) -> bool:
    """Whether an answer is longer or more deeply nested than any that is meant: the parser's time
    grows with the square of both. The end of a response without a box is always graded."""
    deepest = depth = 0
    for sign in answer:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest > _MAX_DEPTH or len(answer) > _MAX_PROSE


@functools.cache
def _extraction() -> tuple[object, ...]:
    """Boxed answers take precedence over other expressions, because prompts ask for them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
