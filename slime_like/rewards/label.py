"""What every reward that compares with a label asks of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def missing_label(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Why no response to this row can be scored, where it has no label; else None."""
    return (
        "the label is missing or null; name its field with --label-key" if label is None else None
    )
