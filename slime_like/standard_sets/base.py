"""What is known of a standard evaluation set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_like.registry import Registry
from slime_like.template import parse_template

if TYPE_CHECKING:
    from jinja2 import Template

Row = Mapping[str, Any]


class NotThisSet(ValueError):
    """A row that is none of the set's; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A row of a set, in our own form."""

    shown: Mapping[str, Any]  # the values of the names that a prompt's template may use
    label: object = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # for the reward
    solution: str | None = None  # an answer that the reward must accept, where the row has one


@dataclass(frozen=True, slots=True)
class StandardSet:
    """A standard evaluation set, whose data the user has."""

    about: str  # what it asks, and how many problems
    read: Callable[[Row], Problem]  # raises NotThisSet
    columns: tuple[str, ...]  # of the published files, all their spellings
    names: tuple[str, ...]  # that a prompt's template may use
    template: str  # of the prompt, Jinja
    reward: str  # --rm-type
    files: tuple[str, ...]  # patterns in the folder of a copy; the first that matches any counts
    parts: bool = False  # several such files are parts of one set; Parquet files always are
    hub: tuple[str, ...] = ()  # repositories of the Hugging Face Hub, the most common one first
    # (import name, file in it, distribution) of a package that carries the data
    package: tuple[str, str, str] | None = None
    rm_timeout_s: float = 0.0  # least deadline of a sample's grading

    def convert(self, row: Row, template: str | None = None) -> dict[str, Any]:
        """The row as ``{"prompt", "label", "metadata", "solution"}``.

        Args:
            row: Of a published file.
            template: Of the prompt, in place of the set's.

        Raises:
            NotThisSet: The row lacks something.
            ValueError: The template is none, uses another name, or fails for this row.
        """
        problem = self.read(row)
        written = _parsed(self.template if template is None else template, self.names)
        try:
            prompt = written.render(problem.shown)
        except Exception as error:  # it is the user's program
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"prompt_template fails: {reason}") from error
        return {
            "prompt": prompt,
            "label": problem.label,
            "metadata": dict(problem.metadata),
            "solution": problem.solution,
        }


standard_sets: Registry[StandardSet] = Registry("evaluation set (--eval-sets)")


@functools.cache
def _parsed(text: str, names: tuple[str, ...]) -> Template:
    return parse_template(text, names)[0]


def column(row: Row, *names: str, kind: type | tuple[type, ...] = str) -> Any:
    """The value of the first column that a row has.

    Args:
        row: Of a file.
        names: Spellings of the column in the files of the set.
        kind: What the value must be.

    Raises:
        NotThisSet: There is none, or it is of another kind.
    """
    for name in names:
        if row.get(name) is not None:
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise NotThisSet(f"{name!r} is a {type(value).__name__}, must be {_said(kind)}")
            return value
    wanted = " or ".join(map(repr, names))
    raise NotThisSet(f"has no {wanted}; its columns: {', '.join(sorted(row)) or 'none'}")


def texts(row: Row, *names: str) -> list[str]:
    """A column that is a list of texts. Raises NotThisSet."""
    value = column(row, *names, kind=(list, tuple))
    if not all(isinstance(item, str) for item in value):
        raise NotThisSet(f"{names[0]!r} must be a list of texts")
    return list(value)


def _said(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(each.__name__ for each in kinds)
