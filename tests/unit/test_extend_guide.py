"""The code of the guide "Extend it" is that of examples/extend, which the end-to-end tests run."""

from __future__ import annotations

import re

import pytest

from tests.paths import ROOT

FILES = sorted((ROOT / "examples" / "extend").glob("*.py"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_guide_shows_the_examples(language: str) -> None:
    page = (ROOT / "docs" / language / "extend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert sorted(blocks) == sorted(file.read_text(encoding="utf-8") for file in FILES)
    counts = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert dict(re.findall(r"^\|.*\[(\w+\.py)\].*\| (\d+) \|$", page, re.MULTILINE)) == {
        name: str(count) for name, count in counts.items()
    }
