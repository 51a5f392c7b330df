"""Check shared by all rewards that compare with a label."""

from __future__ import annotations

from collections.abc import Mapping


def missing_label(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, if it has no label; otherwise None."""
    if label is not None:
        return None
    return "the label is missing or null; name its field with --label-key"
