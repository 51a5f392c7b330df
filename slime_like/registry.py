"""A name -> object registry; looking up an unknown name raises an error that lists the legal ones.

Every extension point is such a registry: policy losses, advantage estimators, rewards, model
families, rollout engines and weight transports. Each package declares its own, with a `register_*`
function.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_registrations = 0  # count over all registries
_source: str | None = None  # the user module being imported (--import-modules)


class Registry(Generic[T]):
    """Maps names and aliases to entries. `kind` names an entry in errors, e.g. "policy loss"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T | Callable[[], T]] = {}
        self._lazy: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._help: dict[str, str] = {}
        self._sources: dict[str, str] = {}

    def add(self, name: str, entry: T, aliases: Iterable[str] = (), *, help: str = "") -> None:
        """Add an entry under `name` and `aliases`. help: one sentence about it for --help.

        Raises:
            ValueError: One of the names is taken.
        """
        aliases = tuple(aliases)
        for key in (name, *aliases):
            if key in self._entries or key in self._aliases:
                raise ValueError(f"{self.kind} {key!r} is registered already; choose another name")
        self._entries[name] = entry
        self._aliases.update(dict.fromkeys(aliases, name))
        self._help[name] = help
        if _source is not None:
            self._sources[name] = _source
        _count()

    def add_lazy(self, name: str, path: str, *, help: str = "") -> None:
        """Add the entry "module:attribute", to be imported on first lookup."""

        def load() -> T:
            module, _, attribute = path.partition(":")
            return cast(T, getattr(importlib.import_module(module), attribute))

        self.add(name, cast(T, load), help=help)
        self._lazy.add(name)

    def remove(self, name: str) -> None:
        """Remove an entry and its aliases.

        Raises:
            ValueError: There is no such entry.
        """
        name = self.canonical(name)
        for table in (self._entries, self._help, self._sources):
            table.pop(name, None)
        self._lazy.discard(name)
        self._aliases = {a: target for a, target in self._aliases.items() if target != name}
        _count()

    def canonical(self, name: str) -> str:
        """Resolve an alias to the registered name. Raises ValueError listing all legal names."""
        name = self._aliases.get(name, name)
        if name not in self._entries:
            legal = ", ".join(self.names())
            raise ValueError(f"unknown {self.kind} {name!r}; legal values: {legal}")
        return name

    def get(self, name: str) -> T:
        name = self.canonical(name)
        if name in self._lazy:
            self._entries[name] = cast(Callable[[], T], self._entries[name])()
            self._lazy.discard(name)
        return cast(T, self._entries[name])

    def __contains__(self, name: object) -> bool:
        """Whether `name` is registered, not counting aliases."""
        return name in self._entries

    def names(self, with_aliases: bool = False) -> list[str]:
        names = sorted(self._entries)
        return names + sorted(self._aliases) if with_aliases else names

    def items(self) -> Iterator[tuple[str, T]]:
        return iter([(name, self.get(name)) for name in self.names()])

    def help(self) -> str:
        """``name: description.`` of every entry that has a description, for --help."""
        return " ".join(f"{name}: {self._help[name]}" for name in self.names() if self._help[name])

    def source(self, name: str) -> str | None:
        """The --import-modules module that added this entry; None for built-in ones."""
        return self._sources.get(self.canonical(name))


def registrations() -> int:
    """Number of changes to all registries so far: a cache key for anything built from them."""
    return _registrations


@contextlib.contextmanager
def registering_for(module: str) -> Iterator[None]:
    """While the user module `module` is being imported, attribute new registrations to it."""
    global _source
    before = _source
    _source = module
    try:
        yield
    finally:
        _source = before


def _count() -> None:
    global _registrations
    _registrations += 1
