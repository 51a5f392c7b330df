"""What the page of the Python API says of the fields of a class."""

from __future__ import annotations

from pathlib import Path

import griffe

from scripts.docs_fields import FieldDocstrings, comment_of, descriptions


def test_a_comment_behind_comes_before_those_above() -> None:
    lines = ["# of b", "a: int  # [T]", "# two", "# lines", 'b: str = "#"', "", "c: int", "# d"]
    found = [comment_of(lines, n, n) for n in (2, 5, 7)]
    assert found == ["[T]", "two lines", ""]


def test_a_comment_of_several_fields_is_for_each() -> None:
    comments = {"a": "a, b: [T] int64", "b": "", "c": "c, x: 2", "d": ""}
    assert descriptions(comments) == {"a": "[T] int64", "b": "[T] int64", "c": "c, x: 2"}


ROWS = '''
class Row:
    """One row."""

    tokens: Tensor  # [L] int64
    # length, start: of the
    # response
    length: int
    start: int
    # of the model
    _hidden: int = 0
    mode = "a"  # or "b"

    @property
    def ended(self) -> bool:  # or not
        """Whether it has."""


class Bare:
    tokens: Tensor
'''


def test_a_class_gets_a_list_of_its_fields(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    rows = griffe.load(
        "rows", search_paths=[tmp_path], extensions=griffe.Extensions(FieldDocstrings())
    )
    assert rows["Row"].docstring.value == (
        "One row.\n\nAttributes:\n    tokens: [L] int64\n    length: of the response\n"
        '    start: of the response\n    mode: or "b"'
    )
    assert rows["Bare"].docstring is None
