"""Tests that commands, documents and comments name are there, and tests/unit has the folders of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT

COMMANDS = [ROOT / name for name in (".ci/run", "Makefile", "CONTRIBUTING.md")]
DOCUMENTS = [ROOT / "README.md", ROOT / "README_zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("slime_like", "arguments", "megatron_patches", "scripts", "benchmarks", "examples", "tests")
_FILE_OF_TESTS = re.compile(r"(?<![\w/.])tests/[\w/]+\.\w+")
LIBRARY = ROOT / "slime_like"
OUTSIDE_THE_LIBRARY = ("arguments", "megatron_patches", "benchmarks", "examples", "scripts")


def missing_in(path: Path) -> list[str]:
    """Files of tests that a file names, and that are not there."""
    named = _FILE_OF_TESTS.findall(path.read_text(encoding="utf-8"))
    return sorted({file for file in named if not (ROOT / file).is_file()})


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_name_tests_that_are_there(path: Path) -> None:
    assert _FILE_OF_TESTS.search(path.read_text(encoding="utf-8"))
    assert missing_in(path) == []


def test_documents_and_code_name_tests_that_are_there() -> None:
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = {str(path.relative_to(ROOT)): missing_in(path) for path in (*DOCUMENTS, *code)}
    assert {path: files for path, files in missing.items() if files} == {}


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    gone = "tests/" + "unit/test_gone.py"
    (tmp_path / "run").write_text(f"pytest {gone} tests/unit/test_named_tests.py\n")
    assert missing_in(tmp_path / "run") == [gone]


def test_unit_tests_are_in_the_folders_of_the_code() -> None:
    """tests/unit/losses is for slime_like/losses, tests/unit/arguments/rules for arguments/rules."""
    unit = ROOT / "tests" / "unit"
    for folder in sorted({path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}):
        code = ROOT if folder.parts and folder.parts[0] in OUTSIDE_THE_LIBRARY else LIBRARY
        assert (code / folder).is_dir(), f"tests/unit/{folder} is for no folder of the code"
