"""argparse actions of the launcher, and checks of flags added by a user's function."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import slime_like
from arguments.aliases import MAY_BE_EMPTY
from arguments.flag_registry import FlagTable, normalise
from arguments.flags import Flag, Kind
from arguments.values import legal_values
from slime_like.config import ConfigError, Problem

if TYPE_CHECKING:
    from arguments.parser import LauncherParser

CUSTOM_ARGUMENTS = "--custom-arguments-path"


class HelpRequested(Exception):
    """--help or --version was given. The only argument is the text to print."""


class LauncherAction(argparse.Action):
    """An action that receives raw strings and collects problems instead of exiting."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        launcher = cast("LauncherParser", parser)
        assert option_string is not None
        args = [str(value) for value in values or ()]
        self.apply(launcher, launcher.typed.get(option_string, option_string), args)
        if self.dest in launcher.parsed.values:
            setattr(namespace, self.dest, launcher.parsed.values[self.dest])

    def apply(self, parser: LauncherParser, typed: str, args: list[str]) -> None:
        raise NotImplementedError


class Setting(LauncherAction):
    """Sets one field. on: the value that this spelling of a switch sets."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, flag: Flag, on: bool | None
    ) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs={"switch": "?", "list": "+"}.get(flag.kind),
            const=on,
            default=flag.default,
            type=None if flag.kind in ("switch", "json") else flag.item,
            choices=flag.choices,
            help=(flag.help or argparse.SUPPRESS).replace("%", "%%"),
            metavar=flag.metavar,
        )
        self.flag = flag
        self.on = on

    def apply(self, parser: LauncherParser, typed: str, args: list[str]) -> None:
        flag = self.flag
        parsed = parser.parsed
        if flag.kind == "switch":
            args = args or ["true"]
        if not args and flag.dest in MAY_BE_EMPTY:
            parsed.warnings.append(f"{typed} has no value: {MAY_BE_EMPTY[flag.dest]}")
            return
        if not args:
            parsed.add_problem(typed, None, "requires a value" + legal_values(flag), flag.dest)
        elif args == ["null"]:
            parsed.reset(flag.dest)
        else:
            parser.store(flag, typed, args if flag.kind == "list" else args[0], self.on, parsed)


class OtherFlag(LauncherAction):
    """Flags that are not a setting themselves: presets, flags without effect, flags of other
    programs, unknown flags."""

    def apply(self, parser: LauncherParser, typed: str, args: list[str]) -> None:
        value: object = args or True
        if len(args) == 1:
            value = args[0]
        parser.apply_other(typed, value, parser.parsed)


class Help(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        raise HelpRequested(cast("LauncherParser", parser).help_about(str(values or "")))


class Version(argparse.Action):
    def __call__(self, *_: object) -> None:
        raise HelpRequested(f"slime_like {slime_like.__version__}")


def custom_argv(action: argparse.Action, name: str, value: object) -> list[str]:
    """Convert a value of a run file to command-line arguments."""
    if value is None or (value is False and action.nargs == 0):
        return []
    if value is True and action.nargs == 0:
        return [name]
    items = value if isinstance(value, list) else [value]
    return [f"{name}={items[0]}"] if len(items) == 1 else [name, *map(str, items)]


def flag_of_action(action: argparse.Action) -> Flag:
    """A user-defined flag, for --help, suggestions and documentation."""
    kind: Kind = "value"
    if action.nargs == 0:
        kind = "switch"
    elif action.nargs in ("+", "*"):
        kind = "list"
    return Flag(
        dest=action.dest,
        group="custom arguments",
        kind=kind,
        help="" if action.help in (None, argparse.SUPPRESS) else str(action.help),
        on=tuple(map(normalise, action.option_strings)),
        item=action.type if isinstance(action.type, type) else str,
        default=action.default,
        choices=tuple(action.choices) if action.choices else None,
    )


def check_added(actions: Sequence[argparse.Action], path: str, table: FlagTable) -> None:
    """Raise ConfigError for actions that the function `path` of --custom-arguments-path must not
    add."""
    problems = []
    for action in actions:
        name = (action.option_strings or [action.dest])[0]
        if not action.option_strings or not name.startswith("--"):
            message = f"adds {name}: flags must start with two dashes"
            problems.append(Problem(CUSTOM_ARGUMENTS, path, message))
        elif action.dest in table.by_dest:
            message = f"adds {name}, but the setting {action.dest!r} already exists"
            problems.append(Problem(CUSTOM_ARGUMENTS, path, message))
    if problems:
        raise ConfigError(problems)
