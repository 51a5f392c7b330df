"""scripts/lint_words.py: a new use of a banned word fails, as `make lint` runs it."""

from __future__ import annotations

from pathlib import Path

from scripts.lint_words import BUDGETS, ROOT, problems, sources, uses


def test_no_budget_is_exceeded() -> None:
    assert problems(sources(ROOT), BUDGETS, ROOT) == []


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
