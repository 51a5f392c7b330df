"""1 when the response is the label, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Why no response to this row can be scored, or None."""
    return (
        "the label is missing or null; name its field with --label-key" if label is None else None
    )


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Compares the two without surrounding white space. Raises ValueError when there is no label."""
    if words := problem(label, metadata):
        raise ValueError(words)
    return float(response.strip() == str(label).strip())
