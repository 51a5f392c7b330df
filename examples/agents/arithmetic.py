"""Shared by the agents in this folder: a tool, and the check of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

INSTRUCTIONS = "Answer with a number. Use the tool `add`."
SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
    "required": ["numbers"],
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def add(numbers: list[float]) -> float:
    """The sum of all numbers."""
    return sum(numbers)


def result_of_add(arguments: Any) -> str:
    """The tool's result for the model. arguments: as the model wrote them, JSON or parsed."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(add(**found))
    except (ValueError, TypeError) as error:
        return f"error: {error}"


def is_right(answer: str, label: str) -> bool:
    """Whether the last number in the answer equals the label."""
    found = _NUMBER.findall(answer.replace(",", ""))
    return bool(found) and float(found[-1]) == float(label)
