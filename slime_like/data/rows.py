"""Rows of a data source."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


TASK_PREFIX = "reasoning_gym:"
