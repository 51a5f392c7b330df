"""What the page of the Python API says of the fields of a class."""

from __future__ import annotations

from pathlib import Path

import griffe

from scripts.docs_fields import FieldDocstrings, comment_of, split_fields


def test_a_comment_behind_comes_before_those_above() -> None:
    lines = ["# of b", "a: int  # [T]", "# two", "# lines", 'b: str = "#"', "", "c: int", "# d"]
    found = [comment_of(lines, n, n) for n in (2, 5, 7)]
    assert found == ["[T]", "two lines", ""]


def test_a_docstring_is_split_at_fields_at_the_start_of_sentences() -> None:
    text = (
        "One row. a, b: [T] int64,\nor none: see b. c: a number (d: not here). x: no field.\n\n"
        "d: last. The end."
    )
    assert split_fields(text, {"a", "b", "c", "d"}) == (
        "One row.",
        {
            **dict.fromkeys("ab", "[T] int64, or none: see b."),
            "c": "a number (d: not here). x: no field.",
            "d": "last. The end.",
        },
    )
    assert split_fields("Nothing: of the kind.", {"a"}) == ("Nothing: of the kind.", {})


ROWS = '''
class Row:
    """One row. length: L."""

    tokens: Tensor  # [L] int64
    length: int
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
        'One row.\n\nAttributes:\n    tokens: [L] int64\n    length: L.\n    mode: or "b"'
    )
    assert rows["Bare"].docstring is None
