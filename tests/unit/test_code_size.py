"""Limits that keep the library readable: lines of a function and of a file, and uses of `Any`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("arguments", "megatron_patches", "slime_like")
FUNCTION_LINES = 60
FILE_LINES = 400
LINES_WITH_ANY = 300  # JSON, TOML and libraries without types; may only be lowered


def sources() -> Iterator[tuple[str, str]]:
    """(path, text) of every file of the library."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_functions_and_files_are_short() -> None:
    too_long = []
    for path, text in sources():
        if (lines := text.count("\n")) > FILE_LINES:
            too_long.append(f"{path}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                    too_long.append(f"{path}: {node.name} has {lines} lines")
    assert not too_long


def test_any_is_rare() -> None:
    lines = [line for _, text in sources() for line in text.splitlines()]
    uses = [line for line in lines if re.search(r"\bAny\b", line) and "import" not in line]
    assert len(uses) <= LINES_WITH_ANY
