"""Settings check themselves: each range and each choice of every group, as declared."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import arguments.parse  # noqa: F401  (imports every group of settings)
from slime_like.config import CheckedSettings, SettingsError, flag_name
from tests.unit.command_lines import illegal_value

# what has no default
REQUIRED: dict[str, dict[str, Any]] = {"AdvantageSettings": {"estimator": "grpo"}}


def groups_below(base: type) -> Iterator[Any]:
    """Groups of settings of the library, not those that other tests define."""
    for group in base.__subclasses__():
        if group.__module__.startswith(("slime_like.", "arguments.")):
            yield group
        yield from groups_below(group)


CASES = [
    pytest.param(group, field, id=f"{group.__name__}.{field.name}")
    for group in dict.fromkeys(groups_below(CheckedSettings))
    for field in dataclasses.fields(group)
    if field.metadata.get("choices") or field.metadata.get("legal")
]


@pytest.mark.parametrize(("group", "field"), CASES)
def test_every_range_and_choice_is_checked(group: Any, field: dataclasses.Field[Any]) -> None:
    """The error names the field, what was given, and what is legal."""
    hint = str(typing.get_type_hints(group)[field.name])
    choices, legal = field.metadata["choices"], field.metadata["legal"]
    value = illegal_value(choices, legal, is_integer="int" in hint, is_text="str" in hint)
    given = [value] if "list" in hint else value
    with pytest.raises(SettingsError) as caught:
        group(**{**REQUIRED.get(group.__name__, {}), field.name: given})
    (found,) = caught.value.problems
    assert (found.flag, found.value) == (flag_name(field.name), value)
    wanted = map(str, choices) if choices else (f"must be {legal.description}",)
    assert all(words in found.message for words in wanted)
