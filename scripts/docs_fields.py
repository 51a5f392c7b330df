"""griffe extension for mkdocstrings: documents the fields of a class from the comments behind or
above them. A comment `name, other: what they are` above the first of several fields is for all of
them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from griffe import Class, Docstring, Extension

_CODE_AND_COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^#"'])*#\s?(.*)""")
_NAMES = re.compile(r"((?:\w+, )+\w+): (.*)")


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


def descriptions(comments: Mapping[str, str]) -> dict[str, str]:
    """Descriptions of the fields, by name, from their comments; comments of several are shared."""
    found = {name: comment for name, comment in comments.items() if comment}
    for comment in comments.values():
        shared = _NAMES.fullmatch(comment)
        if shared and set(names := shared[1].split(", ")) <= set(comments):
            found |= dict.fromkeys(names, shared[2])
    return found


class FieldDocstrings(Extension):
    """The extension; griffe calls `on_class` for each class that it has read."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Add an Attributes section with the descriptions of the fields to the docstring of
        `cls`."""
        comments = dict[str, str]()
        for name, field in cls.attributes.items():
            if name.startswith("_") or "property" in field.labels:
                continue
            if isinstance(path := field.filepath, Path):  # not of a namespace package
                first = field.lineno or 1
                last = field.endlineno or 1
                comments[name] = comment_of(field.lines_collection[path], first, last)
        found = descriptions(comments)
        if found:
            lines = [f"    {name}: {found[name]}" for name in comments if name in found]
            text = cls.docstring.value if cls.docstring else ""
            text = "\n".join([text, "", "Attributes:", *lines]).strip()
            cls.docstring = Docstring(text, lineno=cls.lineno, parent=cls)
