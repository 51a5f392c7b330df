"""What every reward that compares with a label asks of a row."""

from __future__ import annotations

from collections.abc import Mapping


def missing_label(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, if it has no label; otherwise None."""
    return (
        "the label is missing or null; name its field with --label-key" if label is None else None
    )
