"""Check shared by all rewards that compare with a label."""

from __future__ import annotations

import math
from collections.abc import Mapping


def missing_label(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, if it has no label that is text or a number;
    otherwise None."""
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return "the label is missing or null; name its field with --label-key"
    if isinstance(label, str | int | float):
        return None
    if isinstance(label, Mapping) and label:
        names = ", ".join(map(str, sorted(label, key=str)))
        return (
            f"the label is an object with {names}, and must be text or a number; name the field in "
            f"it, as in --label-key KEY.{min(label, key=str)}"
        )
    return f"the label is a {type(label).__name__}, and must be text or a number"
