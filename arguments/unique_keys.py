"""Load YAML and JSON with an error for duplicate keys; the standard loaders silently keep the
last one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Hashable

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from slime_like.config import read_number

MOST_SHOWN = 80  # characters of a line, in a message


class Key(str):
    """A key of a YAML file."""

    line: int  # its line number, from 1


class Scalar(str):
    """A number or date without quotes: its text as written, for flags that take text. YAML 1.1
    would read 12:30 as 750 and 010 as 8."""

    @property
    def value(self) -> int | float | str:
        """The number, if it is a decimal one, otherwise the text."""
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return read_number(self, kind)
        return str(self)


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date or number that cannot be
            raise ConstructorError(None, None, str(error), node.start_mark) from error

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value).replace("-", "_")
            if key in lines:
                raise yaml.YAMLError(
                    f"line {line}: the key {key_node.value!r} is given twice, "
                    f"first in line {lines[key]}; keep one of them"
                )
            lines[key] = line
        made = super().construct_mapping(node, deep)
        return {_with_line(key, lines): value for key, value in made.items()}


def _scalar(loader: _Loader, node: yaml.ScalarNode) -> Scalar | float:
    if node.value.lstrip("+-").lower() in (".inf", ".nan"):
        return float(loader.construct_yaml_float(node))
    return Scalar(node.value)


for _tag in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _scalar)
# YAML 1.1 wants a dot and a sign: 1e-6 would be text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"),
    list("-+0123456789."),
)


def _with_line(key: object, lines: dict[str, int]) -> object:
    line = lines.get(str(key).replace("-", "_"))
    if not isinstance(key, str) or isinstance(key, Scalar) or line is None:
        return key
    made = Key(key)
    made.line = line
    return made


def load_yaml(text: str, *, with_lines: bool = False) -> object:
    """Load YAML. Dashes in keys become underscores. Decimal numbers are numbers; what only YAML 1.1
    calls a number or a date is text.

    Args:
        text: Content of the file.
        with_lines: Return string keys as `Key`, and numbers and dates as `Scalar`.

    Raises:
        yaml.YAMLError: The text is no YAML, or a key is duplicated; names the lines.
    """
    try:
        content = yaml.load(text, _Loader)
    except (yaml.MarkedYAMLError, ReaderError) as error:
        raise yaml.YAMLError(_with_place(error, text)) from error
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return content if with_lines else plain(content)


def _with_place(error: yaml.MarkedYAMLError | ReaderError, text: str) -> str:
    """The line, what is wrong there, and its text."""
    context = ""
    if isinstance(error, ReaderError):
        index, problem = error.position, f"the character {error.character!r} is not allowed"
        if isinstance(error.character, int):
            problem = f"the character U+{error.character:04X} is not allowed"
    else:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context)
        if mark is None:
            return problem
        index = mark.index
        if error.problem and error.context:
            context = f" ({error.context}"
            if error.context_mark is not None and error.context_mark.line != mark.line:
                context += f" that starts in line {error.context_mark.line + 1}"
            context += ")"
    start = text.rfind("\n", 0, index) + 1
    line = text[start:].split("\n", 1)[0].strip()[:MOST_SHOWN]
    number = text.count("\n", 0, index) + 1
    place = f"line {number}, column {index - start + 1}"
    return f"{place}: {problem}{context}" + (f", at {line!r}" if line else "")


def plain(value: object) -> object:
    """Replace each `Key` in `value` by a plain string, and each `Scalar` by its value."""
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {str(k) if isinstance(k, Key) else plain(k): plain(v) for k, v in value.items()}


def load_json(text: str) -> object:
    """Load JSON. Raises ValueError naming a duplicate key."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice; keep one of them")
        result[key] = value
    return result
