"""The error messages that the documents quote are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("arguments", "megatron_patches", "scripts", "slime_like")
PAGES = [ROOT / "docs" / language / "checkpoints.md" for language in ("en", "zh")]
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
# what stands in for a value: of a message of the code, any expression in braces
VALUES = re.compile(
    r"rank 1 \(host \.\.\., process \.\.\.\)|;|\.\.\.|\[[\d, ]+\]|\d+|policy/__\S+\.distcp|os\.system|hidden_size|decoder\.layers|checksums"
)


def text_of_the_code() -> str:
    """Every text in it, f-strings with a mark for each value."""
    texts = []
    for path in (path for name in SOURCES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("page", PAGES, ids=[page.parent.name for page in PAGES])
def test_quoted_messages_are_those_of_the_code(page: Path) -> None:
    section = page.read_text(encoding="utf-8").split("\n## ")[-1]
    messages, code = MESSAGE.findall(section), text_of_the_code()
    assert len(messages) > 10
    unknown = [
        (message, part)
        for message in messages
        for part in (text.strip(" :;.,") for text in VALUES.split(message))
        if len(part) > 3 and part not in code
    ]
    assert unknown == []
