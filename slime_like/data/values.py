"""Values of rows: what JSON can hold, since recordings and checkpoints hold them, and the same for
every file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PLAIN = (str, int, float, bool, type(None))


def without_nulls(value: object, kind: Any) -> Any:
    """A value of a Parquet column as JSON has it: maps as dicts, and without the null fields of its
    structs, which Parquet adds to a row that lacks a field of another row's. The fields of a struct
    that is the column itself are kept: they are columns of the table.

    Args:
        value: As pyarrow converts it.
        kind: Its type in pyarrow.
    """
    if isinstance(value, dict):
        return {key: _prune(item, kind.field(key).type) for key, item in value.items()}
    return _prune(value, kind)


def _prune(value: object, kind: Any) -> Any:
    kind = getattr(kind, "storage_type", kind)  # of an extension
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}
        return {key: _prune(item, kind.field(key).type) for key, item in given.items()}
    if isinstance(value, list):
        if hasattr(kind, "key_type"):  # a map is a list of pairs
            return {key: _prune(item, kind.item_type) for key, item in value}
        return [_prune(item, kind.value_type) for item in value]
    return value


def plain(value: object) -> Any:
    """The value with built-in types in place of their subclasses and of numpy's scalars."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if type(value) in _PLAIN:
        return value
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def unwritable(value: object) -> str | None:
    """Why a row cannot be recorded, naming the place; None if it can."""
    return first_problem(value, _kind_problem)


def half_surrogate(value: object) -> str | None:
    """Location of a lone surrogate in a row's text, which cannot be tokenised or written to a file;
    None if there is none."""
    return first_problem(value, _surrogate_problem)


def first_problem(
    value: object, problem: Callable[[object], str | None], where: str = ""
) -> str | None:
    """The first problem in a nested value: of a key, or of a leaf with its location."""
    items: list[tuple[str, object]] = []
    if isinstance(value, list):
        items = [(f"{where}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, Mapping):
        items = [("", key) for key in value]
        for key, item in value.items():
            items.append((f"{where}[{key!r:.60}]" if where else f"{key!r:.60}", item))
    elif found := problem(value):
        return f"{where or 'a key'} {found}"
    return next(filter(None, (first_problem(item, problem, name) for name, item in items)), None)


def _kind_problem(value: object) -> str | None:
    if isinstance(value, tuple):
        return next(filter(None, map(unwritable, value)), None)
    if type(value) in _PLAIN:
        return None
    return (
        f"is a {type(value).__name__}, which no recording or checkpoint can hold (JSON can: text, "
        "numbers, lists, objects); convert the column"
    )


def _surrogate_problem(value: object) -> str | None:
    if isinstance(value, str):
        for i, character in enumerate(value):
            if "\ud800" <= character <= "\udfff":
                return f"has half of a surrogate pair at character {i}"
    return None


def dotted(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys that may be paths into nested objects."""
    return tuple(key for key in keys if "." in key)


def with_paths(row: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The row with the values of dotted keys, each a path into nested objects, like
    ``reward_model.ground_truth``. A key of the row that has dots itself takes precedence."""
    for key in keys:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if key not in row and value is not None:
            row[key] = value
    return row
