"""Rows of settings in a YAML file: evaluation sets (--eval-config) and the sources of a prompt mix
(--prompt-data)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from slime_like.config import value_problem

OF_ONE_ROW = ("name", "path")  # every row has its own, so `defaults` may not have them


def named_rows(
    rows: object, key: str, kind: str, checked: Callable[[object, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The settings of each row.

    Args:
        rows: A list, or a mapping by name.
        key: The name of the list in the file.
        kind: What a row is, for messages.
        checked: Checks a row; see `checked_row`.

    Raises:
        ValueError: Names the row and what is wrong with it.
    """
    if isinstance(rows, dict):
        named = {}
        for name, row in rows.items():
            named[name] = {"name": name, **(row or {})} if isinstance(row, dict | None) else row
        rows = list(named.values())
    if not isinstance(rows, list):
        raise ValueError(f"{key!r} must be a list, or a mapping by name")
    result = []
    for number, row in enumerate(rows):
        name = row.get("name", number) if isinstance(row, dict) else number
        place = f"{kind} {name}"
        values = checked(row, place)
        missing = [each for each in OF_ONE_ROW if each not in values]
        if missing:
            raise ValueError(f"{place} has no {missing[0]!r}")
        result.append(values)
    names = [values["name"] for values in result]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has two {kind}s named {name!r}")
    return result


def checked_row(
    row: object,
    place: str,
    config_type: type,
    kinds: Mapping[str, tuple[type, ...]],
    *,
    spellings: Mapping[str, str],
    forbidden: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The settings of a row, with lists as tuples.

    Args:
        place: The row, for messages.
        config_type: The dataclass of the settings, which declares legal values with `arg`.
        kinds: Legal types by setting.
        spellings: Other names of settings.
        forbidden: Settings that this row may not have.

    Raises:
        ValueError: Names the setting.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place} must be a mapping, not {type(row).__name__}")
    fields = {f.name: f for f in dataclasses.fields(config_type)}
    values: dict[str, Any] = {}
    for typed, value in row.items():
        key = str(spellings.get(typed, typed))
        if key not in kinds or key in forbidden:
            near = difflib.get_close_matches(str(typed), kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"legal keys: {', '.join(kinds)}"
            raise ValueError(f"{place} has the unknown key {typed!r}; {hint}")
        if value is None:
            continue
        is_bool = isinstance(value, bool) and bool not in kinds[key]
        if is_bool or not isinstance(value, kinds[key]):
            names = " or ".join(kind.__name__ for kind in kinds[key])
            raise ValueError(f"{place}: {key} is {value!r}, must be a {names}")
        if message := value_problem(value, None, fields[key].metadata.get("legal")):
            raise ValueError(f"{place}: {key} is {value!r}, {message}")
        if key == "stop" and isinstance(value, str):
            value = [value]
        values[key] = tuple(value) if isinstance(value, list) else value
    return values
