"""argv and YAML -> typed values of flags, with every problem collected."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from arguments.aliases import (
    ALIASES,
    DEPRECATED,
    NO_EFFECT,
    PASSED_ON,
    PRESETS,
    VALUES_NOT_IMPLEMENTED,
    not_implemented,
    without_skyrl_prefix,
)
from arguments.flag_registry import GROUPS, FlagTable, normalise
from arguments.flags import Flag
from slime_like.config import ConfigError, Problem, value_problem

_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*(=.*)?", re.DOTALL)
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(slots=True)
class ParsedArgs:
    """What the user set. values: field name -> value. bad: field names whose value could not be read: rules about them are silent."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)


def is_flag(word: str) -> bool:
    """Negative numbers are values; so is anything with white space where a name would stand."""
    try:
        float(word)
    except ValueError:
        return _FLAG.fullmatch(word) is not None
    return False


def read_command_line(argv: Sequence[str], table: FlagTable) -> ParsedArgs:
    """The command line alone. The last of several words for the same setting counts, as usual in scripts."""
    given = ParsedArgs()
    words = list(argv)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not is_flag(word):
            given.problems.append(
                Problem(
                    word,
                    None,
                    "stands alone; a value comes after its flag, and a switch takes none",
                )
            )
            continue
        following = list(itertools.takewhile(lambda w: not is_flag(w), words[position:]))
        typed, equals, inline = word.partition("=")
        position += _set_words(typed, inline if equals else None, following, table, given)
    return given


def _set_words(
    typed: str, inline: str | None, following: list[str], table: FlagTable, given: ParsedArgs
) -> int:
    """Reads one flag; returns how many of the following words are its own."""
    if (
        inline is not None
        and inline.lower() in _FALSE
        and without_skyrl_prefix(normalise(typed), table.spellings) in PRESETS
    ):
        return 0  # switched off, as it is anyway
    if (holder := passed_on(typed, table)) is not None:
        own = following if inline is None else [inline]
        _pass_on(holder, typed, True if not own else own[0] if len(own) == 1 else own, given)
        return len(own) if inline is None else 0
    flag, switch = _resolve(typed, table, given)
    if flag is None:
        return len(following) if inline is None else 0
    if flag.kind == "switch":
        _store(flag, typed, "true" if inline is None else inline, given, inverted=switch is False)
        return 0
    own = [inline] if inline is not None else following if flag.kind == "list" else following[:1]
    if not own:
        given.problems.append(Problem(typed, None, "needs a value" + legal_words(flag)))
        given.bad.add(flag.dest)
        return 0
    _store(flag, typed, own if flag.kind == "list" else own[0], given)
    return len(own) if inline is None else 0


def passed_on(typed: str, table: FlagTable) -> str | None:
    """The setting that collects flags like this one for another program; None for our own."""
    name = normalise(typed)
    if name in table.spellings or name in ALIASES or not_implemented(name) is not None:
        return None
    return next((holder for prefix, holder in PASSED_ON.items() if name.startswith(prefix)), None)


def _pass_on(holder: str, typed: str, value: Any, given: ParsedArgs) -> None:
    prefix = next(prefix for prefix, name in PASSED_ON.items() if name == holder)
    field_name = normalise(typed).removeprefix(prefix).replace("-", "_")
    given.values[holder] = {**given.values.get(holder, {}), field_name: value}


def _resolve(typed: str, table: FlagTable, given: ParsedArgs) -> tuple[Flag | None, bool | None]:
    """The flag behind a typed name; None, with the problem noted, when there is none or it cannot be used."""
    full = normalise(typed)
    name = without_skyrl_prefix(full, table.spellings)
    if (instead := DEPRECATED.get(full) or DEPRECATED.get(name)) is not None:
        given.warnings.append(f"{typed} is deprecated; use {instead}")
    if name in NO_EFFECT:
        given.warnings.append(f"{typed} has no effect here: {NO_EFFECT[name]}")
        return None, None
    if name in PRESETS:
        given.values.update(PRESETS[name])
        return None, None
    name = ALIASES.get(name, name)
    spelling = table.spellings.get(name)
    if spelling is not None and not spelling.flag.refused:
        if typed.startswith("--"):
            return spelling.flag, spelling.value
        given.problems.append(Problem(typed, None, f"flags start with two dashes: {name}"))
        return None, None
    reason = spelling.flag.refused if spelling is not None else not_implemented(name)
    if reason is not None:
        given.problems.append(
            Problem(typed, None, f"is known but not implemented yet: {reason}; leave it out")
        )
        return None, None
    near = table.nearest(typed)
    hint = f"did you mean {near}?" if near else "see --help for all flags"
    given.problems.append(Problem(typed, None, f"unknown flag; {hint}"))
    return None, None


def legal_words(flag: Flag) -> str:
    if flag.choices:
        return f"; legal values: {', '.join(map(str, flag.choices))}"
    return f"; it must be {flag.legal.words}" if flag.legal is not None else ""


def _store(
    flag: Flag, typed: str, value: Any, given: ParsedArgs, *, inverted: bool = False
) -> None:
    try:
        result = convert(flag, value)
    except ValueError as error:
        given.problems.append(Problem(typed, value, str(error)))
        given.bad.add(flag.dest)
    else:
        given.values[flag.dest] = (not result) if inverted else result


def convert(flag: Flag, value: Any) -> Any:
    """A word, or a value of a YAML file, as the flag's type. Raises ValueError with what is wanted."""
    if flag.kind == "switch":
        return _switch(value)
    if flag.kind == "json":
        return _json_object(value)
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError("needs at least one value")
        return [_scalar(flag, item) for item in items]
    return _scalar(flag, value)


def _switch(value: Any) -> bool:
    word = str(value).lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("must be true or false")


def _json_object(value: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object, as in '{\"enable_thinking\": false}'")
    return parsed


def _scalar(flag: Flag, value: Any) -> Any:
    number = flag.item
    if isinstance(value, dict | list | bool) or value is None:
        raise ValueError(f"must be {_item_words(number)}{legal_words(flag)}")
    if number is not str:
        try:
            result = number(str(value).replace("_", ""))
        except ValueError as error:
            raise ValueError(f"must be {_item_words(number)}{legal_words(flag)}") from error
    else:
        result = str(value)
    later = VALUES_NOT_IMPLEMENTED.get(flag.dest, {}).get(str(result))
    if later and flag.choices is not None and result not in flag.choices:
        raise ValueError(f"is known but not implemented yet: {later}{legal_words(flag)}")
    wrong = value_problem(result, flag.choices, flag.legal)
    if wrong is not None:
        raise ValueError(wrong)
    return result


def _item_words(item: type) -> str:
    return {int: "an integer", float: "a number", str: "a word"}[item]


def read_run_file(path: str, table: FlagTable) -> ParsedArgs:
    """A YAML file of flags. Sections named after the groups of flags, and prefixes of flag names, may be nested."""
    given = ParsedArgs()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([Problem("--config", path, "no such file")]) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            [Problem("--config", path, f"cannot be read: {' '.join(str(error).split())}")]
        ) from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError([Problem("--config", path, "must hold keys and values, as in: lr: 1e-6")])
    _read_section(content, "", table, given)
    if given.values.pop("config", None) is not None:
        given.problems.append(
            Problem("--config", path, "names a run file itself; put its keys here instead")
        )
    return given


# Two ways to say one thing: one on the command line replaces the other of the run file.
EXCLUSIVE = (
    ("num_rollout", "num_epoch"),
    ("num_steps_per_rollout", "global_batch_size"),
    ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("rm_type", "custom_rm_path"),
    ("eval_prompt_data", "eval_config"),
    ("policy_loss_type", "custom_loss_function_path"),
)


def merge(run_file: ParsedArgs, line: ParsedArgs) -> ParsedArgs:
    """The run file and, over it, the command line."""
    replaced = {
        partner for pair in EXCLUSIVE for name, partner in (pair, pair[::-1]) if name in line.values
    }
    kept = {name: value for name, value in run_file.values.items() if name not in replaced}
    problems, warnings = run_file.problems + line.problems, run_file.warnings + line.warnings
    collected = {
        name: {**kept[name], **line.values[name]}
        for name in PASSED_ON.values()
        if name in kept and name in line.values
    }
    return ParsedArgs(kept | line.values | collected, problems, warnings, run_file.bad | line.bad)


def _read_section(
    section: Mapping[Any, Any], prefix: str, table: FlagTable, given: ParsedArgs
) -> None:
    for key, value in section.items():
        name = f"{prefix}-{key}" if prefix else str(key)
        flag_name = normalise(name)
        known = flag_name in table.spellings or flag_name in ALIASES
        if isinstance(value, dict) and not known:
            _read_section(
                value,
                "" if name in GROUPS or name in ("trainer", "megatron") else name,
                table,
                given,
            )
        else:
            _set_key(flag_name, value, table, given)


def _set_key(name: str, value: Any, table: FlagTable, given: ParsedArgs) -> None:
    spelling = table.spellings.get(ALIASES.get(name, name))
    usable = spelling is not None and not spelling.flag.refused
    known = (
        spelling is not None
        or name in NO_EFFECT
        or name in PRESETS
        or not_implemented(name) is not None
    )
    if known and not usable and value in (None, False):
        return  # switched off, as it is anyway
    if (holder := passed_on(name, table)) is not None:
        if value is not None:
            _pass_on(holder, name, value, given)
        return
    flag, switch = _resolve(name, table, given)
    if flag is None or value is None:
        return
    _store(flag, name, value, given, inverted=switch is False)
