"""The launcher's `argparse.ArgumentParser`, built from the flag registry.

Every flag is an action in the group of its dataclass or registry, so that shell completion,
documentation tools and `parse_known_args` work as usual. It differs from plain argparse in that
values are converted in `values.py`, and that all problems are collected instead of stopping at the
first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn, cast

import slime_like
from arguments import values
from arguments.flag_registry import FlagTable
from arguments.flags import APPENDED, MAY_BE_EMPTY, PASSED_ON, Flag, Kind, normalise
from arguments.help import help_text
from arguments.translate.flags import deprecation, is_foreign, translate_flag
from arguments.translate.words import hydra_pair, translate_words, without_skyrl_prefix
from arguments.values import ParsedArgs, legal_values
from slime_like.config import ConfigError, Problem
from slime_like.import_utils import load_function


class LauncherParser(argparse.ArgumentParser):
    """Parser with our conversions and collected problems; see the module docstring. hidden: fields
    of settings that the program does not have."""

    def __init__(self, table: FlagTable, usage: str, hidden: Collection[str] = ()) -> None:
        super().__init__(
            usage=usage.removeprefix("usage: ").replace("%", "%%"),
            allow_abbrev=False,
            add_help=False,
            exit_on_error=False,
        )
        self.table = table
        self.full_usage = usage
        self.hidden = frozenset(hidden)
        self._negative_number_matcher = values.NEGATIVE_NUMBER
        self.parsed = ParsedArgs()
        self.typed: dict[str, str] = {}  # flag -> spelling on this command line
        self._strict = False  # whether unknown flags are problems
        self._custom: dict[str, argparse.Action] = {}  # user-defined flags, by field name
        self._required: list[argparse.Action] = []
        self._without_value: set[argparse.Action] = set()  # user-defined flags
        self.add_argument(
            "--help", "-h", action=Help, nargs="?", metavar="WORD", help="Show the flags."
        )
        self.add_argument("--version", action=Version, nargs=0, help="Show the version.")
        self._add_table()
        self._other = OtherFlag([], argparse.SUPPRESS, nargs="*", help=argparse.SUPPRESS)

    def _add_table(self) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for flag in self.table.flags:
            if flag.rejection:
                continue
            if flag.group not in groups:
                groups[flag.group] = self.add_argument_group(flag.group)
            group = groups[flag.group]
            switch = flag.kind == "switch"
            group.add_argument(
                *flag.on, dest=flag.dest, action=Setting, flag=flag, on=True if switch else None
            )
            if flag.off:
                group.add_argument(*flag.off, dest=flag.dest, action=Setting, flag=flag, on=False)
        for typed, spelling in self.table.aliases().items():
            action = Setting([typed], spelling.flag.dest, spelling.flag, spelling.value)
            action.help = argparse.SUPPRESS
            self._option_string_actions[typed] = action

    # --- reading ---------------------------------------------------------------------------------

    def read(self, argv: Sequence[str]) -> ParsedArgs:
        """Parse a command line, collecting all problems.

        Raises:
            HelpRequested: For --help and --version.
            ConfigError: For a run file without --config.
        """
        self.parsed = ParsedArgs()
        self._strict = True
        self._namespace, extras = self._parse(argv, argparse.Namespace())
        for word in extras:
            pair = hydra_pair(word)
            if is_run_file(word):
                message = f"is not a flag; did you mean --config {word}?"
                self.parsed.add_problem(word, None, message)
            elif pair is None:
                self.parsed.add_problem(word, None, "is not a flag; values follow their flag")
            else:
                self.parsed.add_problem(*pair, f"unknown key; {self.table.hint(pair[0])}")
        self.parsed.check_turned_off()
        forgotten = any(map(is_run_file, extras)) or "-config" in self.typed
        if forgotten and "config" not in self.parsed.values:
            raise ConfigError(self.parsed.problems)  # what the file has would seem missing
        return self.parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As in argparse: returns the values of all flags, including defaults, and the unknown
        words. If there are problems, prints all and exits with status 2."""
        self.parsed = ParsedArgs()
        self._strict = False
        argv = sys.argv[1:] if args is None else args
        try:
            result = self._parse(argv, namespace or argparse.Namespace())
        except HelpRequested as request:
            print(request)
            sys.exit(0)
        self.parsed.check_turned_off()
        if self.parsed.problems:
            self.error(str(ConfigError(self.parsed.problems)))
        return result

    def _parse(
        self, argv: Sequence[str], namespace: argparse.Namespace
    ) -> tuple[argparse.Namespace, list[str]]:
        self.typed = {}
        self._without_value = set()
        words = self._expand(argv)
        others = [
            name
            for name in self.typed
            if name not in self._option_string_actions and (self._strict or self._is_other(name))
        ]
        self._option_string_actions.update(dict.fromkeys(others, self._other))
        try:
            return super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:  # from a user-defined flag
            self.parsed.add_problem(error.argument_name or CUSTOM_ARGUMENTS, None, error.message)
            return namespace, []
        finally:
            for name in others:
                del self._option_string_actions[name]

    def _expand(self, argv: Sequence[str]) -> list[str]:
        """The command line with all flags in their registered spelling."""
        words: list[str] = []
        for word in translate_words(_joined_help(argv), self):
            if not values.is_flag(word):
                words.append(word)
                continue
            typed, equals, inline = word.partition("=")
            name = self._registered_name(typed)
            self.typed[name] = typed
            items = values.json_list(inline) if equals and self._is_list(name) else None
            if items is not None:
                words += [name, *(LITERAL + item for item in items)]
            elif equals and self._is_custom_switch(name):
                words += self._expand_switch(typed, name, inline)
            else:
                words.append(name + equals + inline)
        return words

    def _registered_name(self, typed: str) -> str:
        if not typed.startswith("--"):
            return typed
        return without_skyrl_prefix(normalise(typed), self._option_string_actions)

    def takes_text(self, name: str) -> bool:
        """Whether the words of this setting are converted to its type; False for JSON and for
        flags of others."""
        action = self._option_string_actions.get(self._registered_name(normalise(name)))
        return isinstance(action, Setting) and action.flag.kind in ("value", "list")

    def num_values(self, typed: str) -> float:
        """How many of the words after this flag belong to it at most. Those of other programs take
        all up to the next flag, since only their program knows."""
        name = self._registered_name(typed)
        action = self._option_string_actions.get(name)
        if action is None:
            return math.inf if self._passed_on(name) is not None else 0
        if isinstance(action.nargs, int):
            return action.nargs
        return {None: 1, "?": 0}.get(action.nargs, math.inf)

    def _is_list(self, name: str) -> bool:
        action = self._option_string_actions.get(name)
        return isinstance(action, Setting) and action.flag.kind == "list"

    def _is_custom_switch(self, name: str) -> bool:
        action = self._option_string_actions.get(name)
        return action is not None and action.nargs == 0 and action in self._custom.values()

    def _expand_switch(self, typed: str, name: str, value: str) -> list[str]:
        """Translate ``--x=false`` for a user-defined switch, which argparse does not support; false
        becomes no word at all."""
        try:
            return [name] if values.read_switch(value) else []
        except ValueError as error:
            self.parsed.add_problem(typed, value, str(error))
            return []

    # --- argparse's hooks ------------------------------------------------------------------------

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """How many of the next words (each an A in the pattern) belong to the action."""
        if isinstance(action, LauncherAction):
            count = len(arg_strings_pattern) - len(arg_strings_pattern.lstrip("A"))
            several = action is self._other or action.nargs in ("+", "*")
            return count if several else min(count, 1)
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self.parsed.add_problem(normalise(action.option_strings[0]), None, error.message)
            self._without_value.add(action)
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        if isinstance(action, LauncherAction):
            return list(arg_strings)
        if action in self._without_value:
            return argparse.SUPPRESS
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            flag = normalise(action.option_strings[0])
            self.parsed.add_problem(flag, " ".join(arg_strings), error.message)
            return argparse.SUPPRESS

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
        """No conversion: our defaults are values, not strings."""
        if isinstance(action, LauncherAction):
            return arg_string
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """Print the problem and exit with status 2."""
        self.exit(2, message.rstrip() + "\n")

    def format_help(self) -> str:
        return self.help_about("") + "\n"

    def help_about(self, word: str) -> str:
        """Help on the flags with `word` in their name, or on all flags."""
        return help_text(self.table, word, usage=self.full_usage, hidden=self.hidden)

    # --- one flag --------------------------------------------------------------------------------

    def is_flag_name(self, name: str) -> bool:
        """Whether this is the name of a setting or of another known flag."""
        registered = self._registered_name("--" + name.lstrip("-"))
        return registered in self._option_string_actions or self._is_other(registered)

    def _is_other(self, name: str) -> bool:
        return (
            is_foreign(name)
            or self._passed_on(name) is not None
            or self.table.rejection(name) is not None
        )

    def _passed_on(self, name: str) -> str | None:
        """The prefix if this flag is passed on to another program (see `PASSED_ON`)."""
        if name in self.table.spellings or self.table.rejection(name) is not None:
            return None
        return next((prefix for prefix in PASSED_ON if name.startswith(prefix)), None)

    def store(
        self, flag: Flag, typed: str, value: object, on: bool | None, parsed: ParsedArgs
    ) -> None:
        """Set a field to a raw value, which is converted here. on: False for a negated spelling."""
        parsed.warnings += deprecation(typed, self._registered_name(typed))
        try:
            result = values.convert(flag, value)
        except ValueError as error:
            message = str(error)
            if (owner := self.table.owner_of(value, flag)) is not None:
                message = message.replace("unknown value", f"is a value of {owner}", 1)
            parsed.add_problem(typed, value, message, flag.dest)
        else:
            if flag.dest in APPENDED:
                assert isinstance(result, list)
                result = [*parsed.values.get(flag.dest, []), *result]
            parsed.assign(flag.dest, (not result) if on is False else result, typed)

    def apply_other(self, typed: str, value: object, parsed: ParsedArgs) -> None:
        """Process a flag that is not a setting itself. value: True if none was given."""
        name = self._registered_name(typed)
        if translate_flag(name, typed, value, parsed):
            return None
        if (prefix := self._passed_on(name)) is not None:
            holder = PASSED_ON[prefix]
            key = name.removeprefix(prefix).replace("-", "_")
            parsed.values[holder] = {**parsed.values.get(holder, {}), key: value}
            return None
        if not typed.startswith("--") and (ours := normalise(typed)) in self._option_string_actions:
            return parsed.add_problem(typed, None, f"flags start with two dashes: {ours}")
        if (reason := self.table.rejection(name)) is not None:
            return parsed.add_problem(typed, None, f"not implemented ({reason}); remove it")
        return parsed.add_problem(typed, None, f"unknown flag; {self.table.hint(name)}")

    def set_key(
        self,
        key: str,
        value: object,
        parsed: ParsedArgs,
        line: int | None = None,
        path: str | None = None,
    ) -> None:
        """Process a key of a run file.

        Args:
            key: The flag, without the names of sections.
            value: As parsed by YAML.
            line: Its line number.
            path: The key with its sections, joined by dots; named in messages if it is a spelling
                of the flag, as in ``trainer.algorithm.use_tis``.
        """
        typed = normalise(key)
        dotted = f"--{path or key}"
        name = self._registered_name(typed)
        if "." in dotted and self._registered_name(dotted) == name:
            typed = dotted
        action = self._option_string_actions.get(name)
        if isinstance(action, Setting):
            if value is None:
                parsed.unset.add(action.dest)
                return
            if action.dest in parsed.typed:
                return parsed.add_problem(typed, value, parsed.duplicate_message(action.dest, line))
            parsed.lines[action.dest] = line
            return self.store(action.flag, typed, value, action.on, parsed)
        if action is not None and action in self._custom.values():
            parsed.custom_argv += custom_argv(action, name, value)
        elif value is None or (value is False and self.table.rejection(name) is not None):
            pass  # switched off, which is the default
        elif parsed.file is not None and not self._is_other(name):
            place = parsed.file if line is None else f"{parsed.file}, line {line}"
            hint = self.table.hint(name, as_key=True)
            parsed.add_problem(f"{place}: {path or key}", None, f"unknown key; {hint}")
        else:
            self.apply_other(typed, value, parsed)

    # --- user-defined flags ----------------------------------------------------------------------

    def add_custom(self, path: str) -> None:
        """Let the function of --custom-arguments-path add its flags.

        Raises:
            ConfigError: The function cannot be imported, raises, or adds an invalid flag.
        """
        before = set(self._actions)
        try:
            load_function(path, CUSTOM_ARGUMENTS)(self)
        except ValueError as error:
            message = str(error).removeprefix(f"{CUSTOM_ARGUMENTS} {path!r}: ")
            raise ConfigError([Problem(CUSTOM_ARGUMENTS, path, message)]) from error
        except Exception as error:
            message = f"raised {type(error).__name__}: {error}"
            raise ConfigError([Problem(CUSTOM_ARGUMENTS, path, message)]) from error
        added = [action for action in self._actions if action not in before]
        check_added(added, path, self.table)
        for action in added:
            self._custom[action.dest] = action
            if action.required:  # checked later: argparse would only look at the command line
                self._required.append(action)
                action.required = False
            for option in action.option_strings:
                self._option_string_actions.setdefault(normalise(option), action)
        self.table = self.table.with_flags([flag_of_action(a) for a in self._custom.values()])

    def set_defaults(self, **kwargs: object) -> None:
        """Set defaults of flags that a user module has added; ours are in the dataclasses."""
        ours = sorted(set(kwargs) & set(self.table.by_dest))
        if ours:
            raise ValueError(f"sets the default of {ours[0]!r}; use a --config file instead")
        super().set_defaults(**kwargs)

    def custom_values(self, run_file: ParsedArgs, argv: Sequence[str]) -> dict[str, object]:
        """Values of the user-defined flags; the command line takes precedence over the run file.
        Problems are added to those of the run file."""
        if not self._custom:
            return {}
        self.parsed = ParsedArgs()
        self._strict = True
        namespace, _ = self._parse([*run_file.custom_argv, *argv], argparse.Namespace())
        names = {normalise(o) for a in self._custom.values() for o in a.option_strings}
        run_file.problems += [p for p in self.parsed.problems if p.flag in names]
        for action in self._required:
            if getattr(namespace, action.dest) == action.default:
                message = f"required by {CUSTOM_ARGUMENTS}"
                run_file.add_problem(action.option_strings[0], None, message)
        return {dest: getattr(namespace, dest) for dest in self._custom}


def is_run_file(word: str) -> bool:
    """Whether a word that belongs to no flag is a run file."""
    return word.endswith((".yaml", ".yml"))


LITERAL = "\0"  # before a word that is a value whatever it looks like; no command line has it
CUSTOM_ARGUMENTS = "--custom-arguments-path"
CUSTOM_GROUP = "custom arguments"  # of user-defined flags


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
            args = [word[1:] if word[:1] == LITERAL else values.unquoted(word) for word in args]
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


def _joined_help(argv: Sequence[str]) -> Iterator[str]:
    """The command line with --help and its word joined, because argparse rejects a separate word
    that looks like a flag."""
    arguments = iter(argv)
    for word in arguments:
        is_help = word in ("--help", "-h")
        yield "=".join(["--help", *itertools.islice(arguments, 1)]) if is_help else word


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
        group=CUSTOM_GROUP,
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
