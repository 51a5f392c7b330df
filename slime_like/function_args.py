"""The run's settings as user functions get them: slime's ``args``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FunctionArgs:
    """Settings by the names of their flags; read-only, can be pickled."""

    def __init__(self, values: Mapping[str, object]) -> None:
        object.__setattr__(self, "_values", dict(values))  # its own __setattr__ refuses

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of pickle and copy
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"args has no {name!r}: unknown setting") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"args.{name}: the settings are read-only")

    def __reduce__(self) -> tuple[type[FunctionArgs], tuple[dict[str, object]]]:
        return FunctionArgs, (self._values,)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return sorted(self._values)


NO_SETTINGS = FunctionArgs({})


def is_plain(value: object) -> bool:
    """Whether a value is text, a number, None, or a list, tuple or dict of such."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | int | float)
