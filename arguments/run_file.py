"""Read the YAML file of flags that `--config` names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from arguments.flag_registry import GROUPS, FlagTable
from arguments.flags import normalise
from arguments.translate.names import SECTIONS
from arguments.unique_keys import Key, Scalar, load_yaml, plain
from arguments.values import ParsedArgs
from slime_like.config import ConfigError, Problem

if TYPE_CHECKING:
    from arguments.parser import LauncherParser

EARLIER_SECTIONS = ("gates", "network, restated")  # of releases that had these names


def read_run_file(path: str, parser: LauncherParser) -> ParsedArgs:
    """Read the settings in a YAML file. Groups of docs/flags.md and prefixes of flag names may be
    sections.

    Args:
        path: The file.
        parser: Has all flags.

    Raises:
        ConfigError: The file is not a mapping with unique keys.
    """
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"), with_lines=True)
    except FileNotFoundError:
        raise ConfigError([Problem("--config", path, "no such file")]) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            [Problem("--config", path, f"cannot be read: {' '.join(str(error).split())}")]
        ) from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError([Problem("--config", path, "must be a mapping, e.g. lr: 1e-6")])
    parsed = ParsedArgs(file=path)
    read_section(content, "", "", parser, parsed)
    if parsed.values.pop("config", None) is not None:
        parsed.add_problem(
            "--config", path, "cannot name another run file; include its keys instead"
        )
    parsed.check_turned_off()
    return parsed


def section_names(table: FlagTable) -> dict[str, str]:
    """Names that a section may have, by `section_key`: titles of docs/flags.md, our group names,
    earlier ones, and those of other programs.

    A title may be written in full (``policy loss: sapo``) or without its part in parentheses
    (``optimizer`` for ``optimizer (megatron-core)``), in any case and with any separators.
    """
    titles = {flag.group for flag in table.flags if not flag.rejection} | set(GROUPS)
    titles |= {title.split(" (")[0] for title in titles}
    names = sorted((*titles, *SECTIONS, *EARLIER_SECTIONS))
    return {section_key(title): title for title in names}


def section_key(title: str) -> str:
    """Normal form of a section title, without case and separators."""
    return "".join(letter for letter in title.lower() if letter.isalnum())


def read_section(
    section: Mapping[object, object],
    prefix: str,
    path: str,
    parser: LauncherParser,
    parsed: ParsedArgs,
) -> None:
    """Read the keys of a section.

    Args:
        prefix: Of flag names.
        path: Names of the sections around it, each with a dot.
    """
    sections = section_names(parser.table)
    for key, value in section.items():
        name = f"{prefix}-{key}" if prefix else str(key)
        is_section = section_key(name) in sections
        content = {} if value is None and is_section else value
        is_flag = parser.is_flag_name(name) and not _is_section_too(name, parser)
        if isinstance(content, dict) and not is_flag:
            near = None if is_section else _section_like(name, parser.table)
            if near is not None:
                parsed.add_problem(f"{path}{key}", None, f"unknown section; did you mean {near}?")
                is_section = True  # so that its settings are not reported as missing
            read_section(content, "" if is_section else name, f"{path}{key}.", parser, parsed)
        else:
            line = key.line if isinstance(key, Key) else None
            # a flag's own type says what a number in the file is
            value = _texts(value) if parser.takes_text(name) else plain(value)
            parser.set_key(name, value, parsed, line, path=f"{path}{key}")


def _texts(value: object) -> object:
    """A value, or the items of a list, with numbers and dates as text."""
    if isinstance(value, list):
        return [_texts(item) for item in value]
    return str(value) if isinstance(value, Scalar) else plain(value)


def _section_like(name: str, table: FlagTable) -> str | None:
    """The section that a key with a mapping may mean; None if it is a prefix of flags, or like no
    section."""
    prefix = f"{normalise(name)}-"
    if any(spelling.startswith(prefix) for spelling in table.spellings):
        return None
    sections = section_names(table)
    found = difflib.get_close_matches(section_key(name), sections, n=1, cutoff=0.75)
    return sections[found[0]] if found else None


def _is_section_too(name: str, parser: LauncherParser) -> bool:
    """Whether a flag name is also a section title, e.g. ``optimizer``; as a flag it takes no
    mapping."""
    flag = parser.table.spellings.get(normalise(name))
    return (
        section_key(name) in section_names(parser.table)
        and flag is not None
        and flag.flag.kind != "json"
    )
