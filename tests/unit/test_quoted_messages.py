"""The error messages that the documents quote are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import ROOT

SOURCES = ("arguments", "megatron_patches", "scripts", "slime_like")
# page: the least number of messages that it explains
NAMES = {"checkpoints.md": 15, "clusters.md": 8, "checkpoints_and_debugging.md": 6, "sglang.md": 3}
PAGES = [ROOT / "docs" / language / name for language in ("en", "zh") for name in NAMES]
TITLES = (
    "What an error means",
    "When something is wrong",
    "Troubleshooting",
    "错误信息的含义",
    "出问题时",
    "故障排查",
)
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
METRIC = re.compile(r"\w+/\w+")
# what stands in for a value: of a message of the code, any expression in braces
VALUES = re.compile(
    r"rank 1 \(host \.\.\., process \.\.\.\)|rank \.\.\.|;|\.\.\.|\[[\d, ]+\]|\d+"
    r"|policy/__\S+\.distcp|os\.system|hidden_size|decoder\.layers"
    r"|checksums|'default'|problems"
)


def text_of_the_code() -> str:
    """Every text in it, f-strings with a mark for each value; shell scripts whole."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.sh")]
    for path in (path for name in SOURCES for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.fixture(scope="module")
def code() -> str:
    return text_of_the_code()


@pytest.mark.parametrize("page", PAGES, ids=[f"{page.parent.name}-{page.stem}" for page in PAGES])
def test_quoted_messages_are_those_of_the_code(page: Path, code: str) -> None:
    sections = [
        text for text in page.read_text(encoding="utf-8").split("\n## ") if text.startswith(TITLES)
    ]
    messages = [
        message.removeprefix("warning: ")  # the log handler writes the level
        for text in sections
        for message in MESSAGE.findall(text)
        if not METRIC.fullmatch(message)
    ]
    assert len(messages) >= NAMES[page.name]
    unknown = [
        (message, part)
        for message in messages
        for part in (text.strip(" :;.,") for text in VALUES.split(message))
        if len(part) > 3 and part not in code
    ]
    assert unknown == []
