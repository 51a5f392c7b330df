"""scripts/lint_words.py: a new use of a banned word fails, as `make lint` runs it."""

from __future__ import annotations

from pathlib import Path

from scripts.lint_words import (
    BUDGETS,
    DOCUMENT_BUDGETS,
    ROOT,
    documents,
    problems,
    sources,
    uses,
)


def test_no_budget_is_exceeded() -> None:
    assert problems(sources(ROOT), BUDGETS, ROOT) == []
    assert problems(documents(ROOT), DOCUMENT_BUDGETS, ROOT) == []


def test_one_use_more_than_the_budget_fails_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Beside it."""\nx = 1  # beside\n')
    assert problems([path], {"beside": (2, "next to")}, tmp_path) == []
    (message,) = problems([path], {"beside": (1, "next to")}, tmp_path)
    assert message.startswith("'beside': 2 uses, the budget is 1; say: next to.")
    assert message.endswith("module.py:1 module.py:2")


def test_names_and_methods_are_no_uses() -> None:
    assert uses("tell", "file.tell() + _tell(x) + teller\n# Tell it, and tell\n") == [2, 2]
    assert uses("of its own", "a group\nof its own, of its owner") == [2]


def test_code_of_a_document_is_no_use(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`beside it`\n```text\nbeside\n```\nIt is beside it.\n")
    (message,) = problems([page], {"beside": (0, "next to")}, tmp_path)
    assert message.endswith("In: page.md:5")


def test_generated_pages_are_left_out() -> None:
    names = {path.name for path in documents(ROOT)}
    assert {"README.md", "agents.md", "reductions.md", "internals.md"} <= names
    assert not {"flags.md", "their_bugs.md"} & names
