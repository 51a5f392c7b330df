"""1 if the response is the label, otherwise 0."""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.rewards.label import missing_label


def score(response: str, label: object, metadata: Mapping[str, object]) -> float:
    """1 if response and label are equal after stripping white space, otherwise 0. Raises ValueError
    without a label."""
    if reason := missing_label(label, metadata):
        raise ValueError(reason)
    return float(response.strip() == str(label).strip())
