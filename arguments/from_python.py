"""A run's settings as Python values instead of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike, fspath

from arguments.flag_registry import FlagTable
from arguments.flags import PASSED_ON
from arguments.parser import CUSTOM_GROUP, LauncherParser
from arguments.run_file import read_section
from arguments.values import NEGATIVE_NUMBER, ParsedArgs, quoted


def read_settings(settings: Mapping[str, object], parser: LauncherParser) -> ParsedArgs:
    """Read settings by the names of their flags, with the rules of a run file: `lora_rank` or
    `lora-rank`, groups of docs/flags.md may be nested mappings, None is the default."""
    parsed = ParsedArgs()
    plain: dict[object, object] = {str(key): _plain(value) for key, value in settings.items()}
    read_section(plain, "", "", parser, parsed)
    parsed.check_turned_off()
    return parsed


def as_words(parsed: ParsedArgs, table: FlagTable) -> list[str]:
    """The command line that has these settings."""
    words: list[str] = []
    passed_on = {holder: prefix for prefix, holder in PASSED_ON.items()}
    flags = {flag.dest: flag for flag in table.flags if not flag.rejection}
    for dest, value in parsed.values.items():
        if dest in passed_on:
            for name, item in value.items():
                words += _words(passed_on[dest] + name.replace("_", "-"), item)
        elif flags[dest].kind == "switch":
            words.append(flags[dest].on[0] if value else f"{flags[dest].on[0]}=false")
        elif flags[dest].kind == "json":
            words += _words(flags[dest].on[0], json.dumps(value))
        elif flags[dest].group == CUSTOM_GROUP:
            words += _words(flags[dest].on[0], value)
        else:
            words += _own_words(flags[dest].on[0], value)
    return [*words, *parsed.custom_argv]


def _words(flag: str, value: object) -> list[str]:
    """The words of a value of another program's or a user's flag."""
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _own_words(flag: str, value: object) -> list[str]:
    """The words of a value of ours, of any text: see `values.unquoted` and `values.json_list`."""
    if not isinstance(value, list):
        return _words(flag, quoted(str(value)))
    items = list(map(str, value))
    plain = [item for item in items if NEGATIVE_NUMBER.match(item) or not item.startswith("-")]
    if plain == items == list(map(quoted, items)):
        return [flag, *items]
    return [f"{flag}={json.dumps(items)}"]


def _plain(value: object) -> object:
    """Mappings, lists, strings, numbers and None, as a YAML file would have them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
