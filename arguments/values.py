"""Convert command-line strings and YAML values to a flag's type, and collect settings and
problems."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from arguments.flags import PASSED_ON, Flag
from arguments.translate.names import VALUES_NOT_IMPLEMENTED
from arguments.unique_keys import load_json
from slime_like.config import Problem, flag_name, read_number, value_problem

TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
SWITCH_VALUES = "must be true or false, or no value at all"


@dataclass(slots=True)
class ParsedArgs:
    """Settings from one source, a command line or a run file."""

    values: dict[str, Any] = field(default_factory=dict)  # field name -> value
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)  # fields with unreadable values; rules skip them
    # field name -> the flag that set it, as typed
    typed: dict[str, str] = field(default_factory=dict)
    # field name -> (flag as typed, value), for a turned-off switch that stands for this value
    turned_off: dict[str, tuple[str, object]] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)  # set to null: the default overrides a run file
    lines: dict[str, int | None] = field(default_factory=dict)  # field name -> line in a run file
    file: str | None = None  # the run file, for messages about its keys
    # flags of --custom-arguments-path in a run file, as command-line arguments
    custom_argv: list[str] = field(default_factory=list)
    custom: dict[str, object] = field(default_factory=dict)  # values of user-defined flags

    def add_problem(self, typed: str, value: object, message: str, dest: str | None = None) -> None:
        """Record a problem. dest: field that has no valid value because of it."""
        self.problems.append(Problem(typed, value, message))
        if dest is not None:
            self.invalid.add(dest)

    def duplicate_message(self, dest: str, line: int | None) -> str:
        """Error message for a key, in `line` of a run file, whose setting an earlier one has."""
        place = "" if self.file is None else " in the run file"
        place += "" if line is None else f", in line {line}"
        first = self.lines.get(dest)
        first_place = "" if first is None else f" in line {first}"
        return f"is set twice{place}, first as {self.typed[dest]}{first_place}; keep one of them"

    def assign(self, dest: str, value: object, typed: str) -> None:
        """Set a field. The last value counts; two different flags that disagree are a problem."""
        before = self.typed.get(dest)
        if before is not None and not same_flag(before, typed) and self.values.get(dest) != value:
            message = f"conflicts with {before}: both set {flag_name(dest)}; keep one of them"
            return self.add_problem(typed, None if value is True else value, message)
        self.values[dest], self.typed[dest] = value, typed
        self.unset.discard(dest)

    def turn_off(self, dest: str, value: object, typed: str) -> None:
        """Turn off a switch that stands for `value`; overrides a run file that turned it on."""
        if self.typed.get(dest) == typed:
            del self.values[dest], self.typed[dest]
        self.turned_off[dest] = (typed, value)

    def reset(self, dest: str) -> None:
        """Set the field to null, i.e. its default; overrides a run file."""
        self.values.pop(dest, None)
        self.typed.pop(dest, None)
        self.unset.add(dest)

    def check_turned_off(self) -> None:
        """Record problems for switches that are off while another flag sets the value that they
        stand for."""
        for dest, (typed, value) in self.turned_off.items():
            other = self.typed.get(dest)
            if other is not None and other != typed and self.values[dest] == value:
                self.add_problem(typed, False, f"conflicts with {other}; remove one of them")


def same_flag(one: str, other: str) -> bool:
    """Whether two spellings are the same flag, up to dashes or underscores and ``no``."""

    def stem(typed: str) -> str:
        return typed.lstrip("-").replace("_", "-").replace(".", "-").removeprefix("no-")

    return stem(one) == stem(other)


def convert(flag: Flag, value: object) -> object:
    """Convert a command-line word or a YAML value to the flag's type.

    Raises:
        ValueError: The message states what is expected, to follow the flag.
    """
    if flag.kind == "switch":
        return read_switch(value)
    if flag.kind == "json":
        return _json_object(value)
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError("requires at least one value")
        if flag.choices and flag.item is str:  # no name of a choice has a comma
            items = [word for item in items for word in str(item).split(",") if word]
        return [_scalar(flag, item) for item in items]
    return _scalar(flag, value)


def read_switch(value: object) -> bool:
    """Parse the value of a switch: true, yes, on, 1 or false, no, off, 0 in any case.

    Raises:
        ValueError: For everything else.
    """
    word = str(value).lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(SWITCH_VALUES)


def _json_object(value: object) -> dict[str, object]:
    try:
        parsed = load_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object, as in '{\"enable_thinking\": false}'")
    return parsed


def _scalar(flag: Flag, value: object) -> object:
    kind = {int: "an integer", float: "a number", str: "a string"}[flag.item]
    if isinstance(value, dict | list | bool) or value is None:
        raise ValueError(f"must be {kind}{legal_values(flag)}")
    try:
        result = str(value) if flag.item is str else read_number(str(value), flag.item)
    except ValueError as error:
        raise ValueError(f"must be {kind}{legal_values(flag) if flag.choices else ''}") from error
    reason = VALUES_NOT_IMPLEMENTED.get(flag.dest, {}).get(str(result))
    if reason and flag.choices is not None and result not in flag.choices:
        raise ValueError(f"not implemented ({reason}){legal_values(flag)}")
    message = value_problem(result, flag.choices, flag.legal)
    if message is not None:
        raise ValueError(message)
    return result


def legal_values(flag: Flag) -> str:
    """The legal values, to append to an error message."""
    if flag.choices:
        return f"; legal values: {', '.join(map(str, flag.choices))}"
    return f"; must be {flag.legal.description}" if flag.legal is not None else ""


# Pairs of flags that set the same thing: one on the command line replaces the other from the run
# file.
EXCLUSIVE = (
    ("num_rollout", "num_epoch"),
    ("num_steps_per_rollout", "global_batch_size"),
    ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("rm_type", "custom_rm_path"),
    ("eval_prompt_data", "eval_config"),
    ("policy_loss_type", "custom_loss_function_path"),
    ("micro_batch_size", "use_dynamic_batch_size"),
    ("micro_batch_size", "max_tokens_per_gpu"),
)


def merge(run_file: ParsedArgs, line: ParsedArgs) -> ParsedArgs:
    """Merge run file and command line, which takes precedence."""
    replaced = set(line.unset)
    for first, second in EXCLUSIVE:
        replaced |= {second} if first in line.values else set()
        replaced |= {first} if second in line.values else set()
    kept = {
        name: value
        for name, value in run_file.values.items()
        if name not in replaced and line.turned_off.get(name, ("", object()))[1] != value
    }
    collected = {
        name: {**kept[name], **line.values[name]}
        for name in PASSED_ON.values()
        if name in kept and name in line.values
    }
    return ParsedArgs(
        kept | line.values | collected,
        run_file.problems + line.problems,
        run_file.warnings + line.warnings,
        run_file.invalid | line.invalid,
        run_file.typed | line.typed,
    )


def merge_settings(settings: ParsedArgs, later: ParsedArgs) -> ParsedArgs:
    """Merge two sources of settings over a run file, of which `later` takes precedence."""
    merged = merge(settings, later)
    merged.turned_off = settings.turned_off | later.turned_off
    merged.custom_argv = settings.custom_argv + later.custom_argv
    return merged


_QUOTED_NULL = re.compile(r'"+null"+')


def unquoted(word: str) -> str:
    """The text of a word: '"null"' is the text null, because the word null resets a flag."""
    return word[1:-1] if _QUOTED_NULL.fullmatch(word) else word


def quoted(text: str) -> str:
    """The word of a text; the inverse of `unquoted`."""
    return f'"{text}"' if re.fullmatch(r'"*null"*', text) else text


def json_list(text: str) -> list[str] | None:
    """The items of ``--flag=["-a", "b"]``, which may look like flags; None if it is no JSON list of
    strings."""
    try:
        items = json.loads(text) if text.startswith("[") else None
    except ValueError:
        return None
    is_list = isinstance(items, list) and items and all(isinstance(item, str) for item in items)
    return items if is_list else None


_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*(=.*)?", re.DOTALL)
NEGATIVE_NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?$|-(inf|nan)$")


def is_flag(word: str) -> bool:
    """Whether a word is a flag. Negative numbers are values, and so are words with white space in
    place of a name."""
    return _FLAG.fullmatch(word) is not None and NEGATIVE_NUMBER.fullmatch(word) is None
