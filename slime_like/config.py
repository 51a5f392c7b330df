"""Declaration and validation of settings. Every layer imports this module; it imports none.

A setting is a field of a frozen dataclass, made with `arg(default, help, ...)`. The parser in
`arguments/` turns the field into a flag; nothing else in the project uses argparse. Legal values
are declared as data, so that `--help`, `docs/flags.md` and error messages agree.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from slime_like.text import mask_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in the configuration."""

    flag: str  # the flag as the user types it, e.g. ``--sapo-tau-pos``
    value: object  # what was given
    message: str  # the problem, the legal values and the remedy

    @property
    def setting(self) -> str:
        """The flag and what was given."""
        value = "" if self.value is None else f" (given: {mask_settings(self.value)!r})"
        return f"{self.flag}{value}"

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"


class ConfigError(ValueError):
    """All errors of a command line or a run file, reported together: a setting is named once, with
    everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs a problem"
        self.problems = tuple(problems)
        messages: dict[str, list[str]] = {}
        for problem in self.problems:
            messages.setdefault(problem.setting, []).append(problem.message)
        count = "1 problem" if len(messages) == 1 else f"{len(messages)} problems"
        lines = [f"{count} in the configuration:"]
        lines += [f"  - {name}: {'; also '.join(each)}" for name, each in messages.items()]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)  # picklable: rank 0 sends it to the others


@dataclass(frozen=True, slots=True)
class Range:
    """A legal range of a number, with the text that describes it."""

    description: str
    holds: Callable[[float], bool]


# How a setting may relate to another one -> (test, description)
RELATIONS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "at_most": (operator.le, "must not be above"),
    "below": (operator.lt, "must be below"),
    "at_least": (operator.ge, "must be at least"),
    "above": (operator.gt, "must be above"),
}


POSITIVE = Range("> 0", lambda x: x > 0)
NON_NEGATIVE = Range(">= 0", lambda x: x >= 0)
AT_LEAST_ONE = Range(">= 1", lambda x: x >= 1)
ABOVE_ONE = Range("> 1", lambda x: x > 1)
UNIT = Range("0 <= x <= 1", lambda x: 0 <= x <= 1)
UNIT_OPEN_HIGH = Range("0 <= x < 1", lambda x: 0 <= x < 1)
UNIT_OPEN_LOW = Range("0 < x <= 1", lambda x: 0 < x <= 1)
MIN_TEMPERATURE = 1e-6  # logits divided by less may overflow float32
TEMPERATURE = Range(f">= {MIN_TEMPERATURE:g}", lambda x: x >= MIN_TEMPERATURE)
GREEDY_OR_TEMPERATURE = Range(
    f"0 (greedy) or >= {MIN_TEMPERATURE:g}", lambda x: x == 0 or x >= MIN_TEMPERATURE
)


def arg(
    default: Any,
    help: str,
    *,
    choices: Sequence[object] | None = None,
    legal: Range | None = None,
    aliases: Sequence[str] = (),
    metavar: str | None = None,
    nargs: str | None = None,
    type: Callable[[str], object] | None = None,
    needs: str | Sequence[str] = (),
    only_with: str | Sequence[str] = (),
    excludes: str | Sequence[str] = (),
    required_with: str | Sequence[str] = (),
    idle_without: str | Sequence[str] = (),
    at_most: str = "",
    below: str = "",
    at_least: str = "",
    above: str = "",
) -> Any:
    """Declare a setting: a dataclass field with the metadata of its flag.

    The last nine arguments declare rules between settings. The first five are conditions, of which
    all must hold: ``"save"``, ``"lr_decay_style=WSD"``, ``"use_kl_loss|kl_coef"``,
    ``"rollout_top_p<1"``, ``"@critic"``. After a comma, the reason continues the message, and after
    a semicolon the remedy: ``"use_opd, which samples nothing; remove it"``. The last four name a
    setting to compare with, or the first of several that is set: ``"critic_lr|lr"``.
    `arguments/rules/declared.py` evaluates them and builds the messages.

    Args:
        aliases: Further spellings, e.g. ``("--dual-clip",)``; the first flag is the field's name.
        needs: An error without these settings, because this one would have no effect.
        only_with: As `needs`; the message says to leave this setting out.
        excludes: Settings that cannot be combined with this one.
        required_with: Settings that require this one.
        idle_without: As `needs`, but only a warning.
        at_most, below, at_least, above: The setting that bounds this one, where both are numbers.

    A field annotated `bool` with default False becomes a switch, with default True a `--no-`
    switch.
    """
    bounds = dict(at_most=at_most, below=below, at_least=at_least, above=above)
    metadata = dict(
        help=help,
        choices=choices,
        legal=legal,
        aliases=tuple(aliases),
        metavar=metavar,
        nargs=nargs,
        type=type,
        needs=_conditions(needs),
        only_with=_conditions(only_with),
        excludes=_conditions(excludes),
        required_with=_conditions(required_with),
        idle_without=_conditions(idle_without),
        relations=tuple((kind, name) for kind, name in bounds.items() if name),
    )
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _conditions(conditions: str | Sequence[str]) -> tuple[str, ...]:
    return (conditions,) if isinstance(conditions, str) else tuple(conditions)


# metadata of a field that is derived, and has no flag
NO_FLAG: Mapping[str, Any] = types.MappingProxyType({"flag": False, "relations": (), "needs": ()})


def flag_name(field_name: str) -> str:
    """``sapo_tau_pos`` -> ``--sapo-tau-pos``."""
    return "--" + field_name.replace("_", "-")


# smallest normal float32 (some processors flush denormals to 0), and the largest float32
SMALLEST_FLOAT32 = 2.0**-126
LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
LARGEST_INTEGER = 2**63 - 1


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|infinity|nan)", re.I | re.A)


def read_number(text: str, kind: type[int] | type[float]) -> int | float:
    """A number as users write it: ASCII digits without separators, unlike ``int("1_0")``, which is
    10. Raises ValueError."""
    if _NUMBER.fullmatch(text.strip()) is None:
        raise ValueError(f"{text!r} is no number")
    return kind(text)


def number_problem(value: float) -> str | None:
    """The problem with a number that float32 (64 bits for integers) cannot hold, or None: 1e39
    would be infinite, 1e-50 would be 0."""
    if isinstance(value, numbers.Integral):
        return None if abs(value) <= LARGEST_INTEGER else "must be an integer of 64 bits"
    if not math.isfinite(value):
        return "must be a finite number"
    if value == 0 or SMALLEST_FLOAT32 <= abs(value) <= LARGEST_FLOAT32:
        return None
    bounds = f"{SMALLEST_FLOAT32:.1e} to {LARGEST_FLOAT32:.1e}"
    return f"must be a number that float32 holds: 0, or {bounds} without its sign"


def value_problem(value: Any, choices: Sequence[object] | None, legal: Range | None) -> str | None:
    """The problem with one value, phrased to follow the flag's name; None if it is legal. Shared by
    the command line and `check_fields`."""
    if choices is not None and value not in choices:
        return f"unknown value; legal values: {', '.join(map(str, choices))}"
    if isinstance(value, int | float) and (wrong := number_problem(value)) is not None:
        return wrong
    if legal is not None and not legal.holds(value):
        return f"must be {legal.description}"
    return None


_KINDS: Mapping[type, tuple[str, Callable[[object], bool]]] = {
    bool: ("True or False", lambda x: isinstance(x, bool)),
    int: ("an integer", lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool)),
    float: ("a number", lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool)),
    str: ("a string", lambda x: isinstance(x, str)),
}


@cache
def _scalar_fields(config_type: type[DataclassInstance]) -> Mapping[str, tuple[type | None, bool]]:
    """Field -> (bool, int, float or str where it is annotated as one of them; whether None is
    legal)."""
    hints = typing.get_type_hints(config_type)
    result: dict[str, tuple[type | None, bool]] = {}
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if union else (hint,)
        scalars = [part for part in parts if part is not type(None)]
        kind = scalars[0] if len(scalars) == 1 and scalars[0] in _KINDS else None
        result[field.name] = kind, hint is Any or type(None) in parts
    return result


def _field_problem(
    value: object, field: dataclasses.Field[object], kind: type | None
) -> str | None:
    if kind is not None:
        description, holds = _KINDS[kind]
        if not holds(value):
            return f"must be {description}"
    return value_problem(value, field.metadata.get("choices"), field.metadata.get("legal"))


def check_fields(config: DataclassInstance) -> list[Problem]:
    """Check each field of `config` by itself: type, legal values, range, NaN and infinity.

    Args:
        config: a dataclass with fields declared by `arg`.

    Returns:
        A `Problem` for each illegal value, in field order. Rules between fields are in
        arguments/rules.
    """
    problems = []
    scalars = _scalar_fields(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kind, optional = scalars[field.name]
        if value is None:
            if not optional:
                problems.append(Problem(flag_name(field.name), None, "needs a value, not None"))
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            wrong = _field_problem(item, field, kind)
            if wrong is not None:
                problems.append(Problem(flag_name(field.name), item, wrong))
    return problems


def relation_problem(kind: str, value: object, name: str, other: object) -> str | None:
    """The problem if a number does not relate to the setting `name` as declared; None if it does,
    or one of them is not set. kind: of `RELATIONS`."""
    holds, description = RELATIONS[kind]
    if not isinstance(value, int | float) or not isinstance(other, int | float):
        return None
    if holds(value, other):
        return None
    text = f"{other:g}" if isinstance(other, float) else other
    return f"{description} {flag_name(name)} {text}"


def check_relations(config: DataclassInstance) -> list[Problem]:
    """Check the declared rules between fields of `config` alone: how numbers relate, and which
    settings are needed with others. For a caller of the library; on the command line
    arguments/rules/declared.py evaluates all declared rules."""
    problems = []
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for field in dataclasses.fields(config):
        value = values[field.name]
        for kind, name in field.metadata["relations"]:
            wrong = relation_problem(kind, value, name, values.get(name))
            if wrong is not None:
                problems.append(Problem(flag_name(field.name), value, wrong))
        for name in field.metadata["needs"]:
            if value is not None and name in values and values[name] is None:
                message = f"has no effect without {flag_name(name)}"
                problems.append(Problem(flag_name(field.name), value, message))
    return problems


class SettingsError(ConfigError):
    """A settings object was constructed with illegal values. Names fields as a caller of the
    library writes them, not flags."""

    def __init__(self, problems: Sequence[Problem], owner: str = "settings") -> None:
        super().__init__(problems)
        self.owner = owner
        fields = (p.flag.lstrip("-").replace("-", "_") for p in problems)
        messages = (f"{name}={p.value!r} {p.message}" for name, p in zip(fields, problems))
        self.args = (f"{owner}: " + "; ".join(messages),)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.owner)


class CheckedSettings:
    """Base of settings dataclasses that validate themselves: construction raises `SettingsError`, a
    ValueError, with every problem that `check_fields` finds."""

    __slots__ = ()
    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[object]]]

    def __post_init__(self) -> None:
        if problems := check_fields(self):
            raise SettingsError(problems, type(self).__name__)
