"""griffe extension for mkdocstrings: documents the fields of a class from this project's notation.

The description of a field is a comment behind or above it, or part of the class docstring, as
`name: what it is.` or `name, other: what they are.` at the start of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from griffe import Class, Docstring, Extension

_CODE_AND_COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^#"'])*#\s?(.*)""")
_NAMES = re.compile(r"(?:^|(?<=[.;]\s))((?:\w+, )*\w+):\s", re.MULTILINE)


def comment_of(lines: Sequence[str], first: int, last: int) -> str:
    """The comment behind or above the statement in lines `first` to `last`, counted from 1."""
    behind = _CODE_AND_COMMENT.fullmatch(lines[last - 1])
    if behind:
        return behind[1]
    above: list[str] = []
    while first > 1 and (match := re.fullmatch(r"\s*#\s?(.*)", lines[first - 2])):
        above.insert(0, match[1])
        first -= 1
    return " ".join(above)


def split_fields(text: str, fields: Collection[str]) -> tuple[str, dict[str, str]]:
    """Split a class docstring into the text without field descriptions, and the descriptions by
    field."""
    rest = []
    found = dict[str, str]()
    for paragraph in text.split("\n\n"):
        starts = [m for m in _NAMES.finditer(paragraph) if set(m[1].split(", ")) <= set(fields)]
        ends = [*(m.start() for m in starts), len(paragraph)][1:]
        for match, end in zip(starts, ends):
            words = " ".join(paragraph[match.end() : end].split())
            found |= dict.fromkeys(match[1].split(", "), words)
        before = paragraph[: starts[0].start()] if starts else paragraph
        if before.strip():
            rest.append(before.strip())
    return "\n\n".join(rest), found


class FieldDocstrings(Extension):
    """The extension; griffe calls `on_class` for each class that it has read."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Add an Attributes section with the descriptions of the fields to the docstring of
        `cls`."""
        fields = {
            name: field
            for name, field in cls.attributes.items()
            if not name.startswith("_") and "property" not in field.labels
        }
        rest, given = split_fields(cls.docstring.value if cls.docstring else "", fields)
        lines = []
        for name, field in fields.items():
            if not isinstance(path := field.filepath, Path):  # a namespace package without files
                continue
            first = field.lineno or 1
            last = field.endlineno or 1
            comment = comment_of(field.lines_collection[path], first, last)
            words = ". ".join(filter(None, (comment, given.get(name))))
            if words:
                lines.append(f"    {name}: {words}")
        if lines:
            text = "\n".join([rest, "", "Attributes:", *lines]).strip()
            cls.docstring = Docstring(text, lineno=cls.lineno, parent=cls)
