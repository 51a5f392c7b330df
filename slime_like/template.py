"""Jinja templates of users: of a judge's prompt, of the prompts of evaluation sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def parse_template(text: str, legal: Sequence[str]) -> tuple[Template, set[str]]:
    """The template, and the names that it uses. It is sandboxed, and an undefined value is an
    error when it is rendered.

    Args:
        text: Of the template.
        legal: The names that it may use.

    Raises:
        ValueError: It is no template, or uses another name; the message has no subject.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    try:
        names = meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja template: line {error.lineno}: {error.message}") from None
    if unknown := sorted(names.difference(legal)):
        raise ValueError(f"has the unknown name {unknown[0]!r}; legal names: {', '.join(legal)}")
    return template, names
