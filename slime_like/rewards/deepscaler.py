"""slime's ``deepscaler``: 1 if the last box after the reasoning is the label, otherwise 0.

The answer follows ``</think>`` or ``###Response``; a response with neither is wrong. math-verify
decides about equality; slime has two own graders.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.rewards import math
from slime_like.rewards.gsm8k import last_boxed


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """Label: text or a number, perhaps in ``\\boxed{}``; with an empty label every response is
    wrong."""
    answer = _answer(response)
    truth = str(label)
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
