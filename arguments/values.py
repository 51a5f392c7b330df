"""Convert command-line strings and YAML values to a flag's type, and collect settings and
problems."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from arguments.aliases import (
    PASSED_ON,
    VALUES_NOT_IMPLEMENTED,
)
from arguments.flags import Flag
from arguments.unique_keys import load_json
from slime_like.config import Problem, flag_name, value_problem

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
SWITCH_VALUES = "must be true or false (a switch may also be given without a value)"


@dataclass(slots=True)
class ParsedArgs:
    """Settings from one source, a command line or a run file.

    values: field name -> value. bad: fields with unreadable values; rules skip them. spelled: field
    name -> the flag that set it, as typed. undone: field name -> (flag as typed, value), for a
    turned-off switch that stands for this value. custom_words: flags of --custom-arguments-path in
    a run file, as command-line words.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    spelled: dict[str, str] = field(default_factory=dict)
    undone: dict[str, tuple[str, object]] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)  # set to null: the default overrides a run file
    lines: dict[str, int | None] = field(default_factory=dict)  # field name -> line in a run file
    custom_words: list[str] = field(default_factory=list)
    custom: dict[str, object] = field(default_factory=dict)  # values of user-defined flags

    def refuse(self, typed: str, value: object, message: str, dest: str | None = None) -> None:
        """Record a problem. dest: field that has no usable value because of it."""
        self.problems.append(Problem(typed, value, message))
        if dest is not None:
            self.bad.add(dest)

    def set_before(self, dest: str, line: int | None) -> str:
        """Error message for a key of a run file, in `line`, whose setting an earlier key has
        set."""
        here = "" if line is None else f", in line {line}"
        before = self.lines.get(dest)
        there = "" if before is None else f" in line {before}"
        return (
            f"is set twice in the run file{here}, first as {self.spelled[dest]}{there}; "
            "keep one of them"
        )

    def put(self, dest: str, value: Any, typed: str) -> None:
        """Set a field. The last value counts; two different flags that disagree are a problem."""
        before = self.spelled.get(dest)
        if before is not None and not same_flag(before, typed) and self.values.get(dest) != value:
            message = f"contradicts {before}: both set {flag_name(dest)}; give one of them"
            return self.refuse(typed, None if value is True else value, message)
        self.values[dest], self.spelled[dest] = value, typed
        self.unset.discard(dest)

    def undo(self, dest: str, value: object, typed: str) -> None:
        """Turn off a switch that stands for `value`; overrides a run file that turned it on."""
        if self.spelled.get(dest) == typed:
            del self.values[dest], self.spelled[dest]
        self.undone[dest] = (typed, value)

    def reset(self, dest: str) -> None:
        """Set the field to null, i.e. its default; overrides a run file."""
        self.values.pop(dest, None)
        self.spelled.pop(dest, None)
        self.unset.add(dest)

    def settle(self) -> None:
        """Record problems for switches that are off while another flag sets the value that they
        stand for."""
        for dest, (typed, value) in self.undone.items():
            other = self.spelled.get(dest)
            if other is not None and other != typed and self.values[dest] == value:
                self.refuse(typed, False, f"contradicts {other}; leave one of them out")


def same_flag(one: str, other: str) -> bool:
    """Whether two spellings are the same flag, up to dashes or underscores and ``no``."""

    def stem(typed: str) -> str:
        return typed.lstrip("-").replace("_", "-").replace(".", "-").removeprefix("no-")

    return stem(one) == stem(other)


def convert(flag: Flag, value: object) -> Any:
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
            raise ValueError("needs at least one value")
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
    wanted = {int: "an integer", float: "a number", str: "a word"}[flag.item]
    if isinstance(value, dict | list | bool) or value is None:
        raise ValueError(f"must be {wanted}{legal_words(flag)}")
    try:
        result = str(value) if flag.item is str else flag.item(str(value).replace("_", ""))
    except ValueError as error:
        raise ValueError(f"must be {wanted}{legal_words(flag)}") from error
    later = VALUES_NOT_IMPLEMENTED.get(flag.dest, {}).get(str(result))
    if later and flag.choices is not None and result not in flag.choices:
        raise ValueError(f"is known but not implemented yet: {later}{legal_words(flag)}")
    wrong = value_problem(result, flag.choices, flag.legal)
    if wrong is not None:
        raise ValueError(wrong)
    return result


def legal_words(flag: Flag) -> str:
    """The legal values, to append to an error message."""
    if flag.choices:
        return f"; legal values: {', '.join(map(str, flag.choices))}"
    return f"; it must be {flag.legal.description}" if flag.legal is not None else ""


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
    gone = {
        partner for pair in EXCLUSIVE for name, partner in (pair, pair[::-1]) if name in line.values
    } | line.unset
    kept = {
        name: value
        for name, value in run_file.values.items()
        if name not in gone and line.undone.get(name, ("", object()))[1] != value
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
        run_file.bad | line.bad,
        run_file.spelled | line.spelled,
    )


_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*(=.*)?", re.DOTALL)
NEGATIVE_NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?$|-(inf|nan)$")


def is_flag(word: str) -> bool:
    """Whether a word is a flag. Negative numbers are values, and so are words with white space in
    place of a name."""
    return _FLAG.fullmatch(word) is not None and NEGATIVE_NUMBER.fullmatch(word) is None
