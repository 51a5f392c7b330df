"""Mathematical equivalence by math-verify: 1 if the response's answer equals the label, otherwise
0.

math-verify limits its time by SIGALRM, which only works in a main thread and cannot stop long
native calls. Its limits are disabled here; this reward runs in a worker process with a deadline
(`grader.py`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

from slime_like.rewards.gsm8k import last_boxed
from slime_like.rewards.label import missing_label


def prepare() -> None:
    """Import the library, so that its import does not count towards a sample's deadline."""
    _extraction()
    # Suppress its once-per-process warning that its own time limits are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


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
    gold = [] if "$" in text or "\\boxed" in text else parse(f"${text}$", parsing_timeout=None)
    gold = gold or parse(text, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the label is no mathematical expression: {text[:80]!r}")
    answer = parse(final_answer(response), extraction_config=_extraction(), parsing_timeout=None)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None))


def equal(answer: str, truth: str) -> bool:
    """Whether two expressions without box or dollar signs are equivalent; False if one is
    unparsable."""
    from math_verify import parse, verify

    gold = parse(f"${truth}$", parsing_timeout=None)
    parsed = parse(f"${answer}$", parsing_timeout=None)
    return bool(gold and parsed and verify(gold, parsed, timeout_seconds=None))


def final_answer(response: str) -> str:
    """The part of the response to grade: the last ``\\boxed{...}`` after the last ``</think>``, or
    without a box all of that part. Earlier boxes are ignored, as in other graders."""
    text = response.rpartition("</think>")[2]
    boxed = last_boxed(text)
    return text if boxed is None else f"\\boxed{{{boxed}}}"


@functools.cache
def _extraction() -> tuple[object, ...]:
    """Boxed answers take precedence over other expressions, because prompts ask for them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
