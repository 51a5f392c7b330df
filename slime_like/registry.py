"""A name -> object table whose lookup error lists the legal names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names, and aliases of names, to entries. `kind` is the word used in errors, e.g. "policy
    loss"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, entry: T, aliases: Iterable[str] = ()) -> None:
        assert name not in self._entries and name not in self._aliases, (
            f"{self.kind} {name!r} is registered twice"
        )
        self._entries[name] = entry
        for alias in aliases:
            assert alias not in self._entries and alias not in self._aliases, (
                f"{self.kind} {alias!r} is registered twice"
            )
            self._aliases[alias] = name

    def canonical(self, name: str) -> str:
        """The registered name that `name` stands for. Raises ValueError with all legal names."""
        name = self._aliases.get(name, name)
        if name not in self._entries:
            raise ValueError(
                f"unknown {self.kind} {name!r}; legal values: {', '.join(self.names())}"
            )
        return name

    def get(self, name: str) -> T:
        return self._entries[self.canonical(name)]

    def names(self, with_aliases: bool = False) -> list[str]:
        names = sorted(self._entries)
        return names + sorted(self._aliases) if with_aliases else names

    def items(self) -> Iterator[tuple[str, T]]:
        return iter(sorted(self._entries.items()))
