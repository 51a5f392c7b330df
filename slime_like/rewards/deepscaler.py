"""slime's ``deepscaler``: 1 when the last box after the reasoning is the label, else 0.

The answer is after ``</think>``, or after ``###Response``; a response with neither is wrong.
Equality is math-verify's, where slime has two graders of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.rewards import math
from slime_like.rewards.gsm8k import last_boxed


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """Label: text or a number, perhaps in ``\\boxed{}``; an empty one makes every response wrong."""
    answer, truth = _answer(response), str(label)
    if "\\boxed" in truth:
        truth = last_boxed(truth) or ""
    if answer is None or not truth.strip():
        return 0.0
    return float(answer.strip() == truth.strip() or math.equal(answer, truth))


def _answer(response: str) -> str | None:
    for marker in ("</think>", "###Response"):
        _, found, rest = response.rpartition(marker)
        if found:
            return last_boxed(rest)
    return None
