"""Rules that fields declare: `arg(..., needs=, only_with=, excludes=)`.

A condition is the name of a setting (it is on), ``name=value``, or alternatives ``a|b=value``.
A declaration speaks about a setting that the user gave a value other than its default.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from arguments.flag_registry import GROUPS, flag_table
from arguments.flags import Flag
from arguments.rules.base import Settings, problem
from slime_like.config import Problem, flag_name


@cache
def _group_of_fields() -> dict[str, str]:
    """Field name -> attribute of `Settings` that has it."""
    return {
        field.name: group
        for group, (_, config_type) in GROUPS.items()
        for field in dataclasses.fields(config_type)
    }


def value_of(s: Settings, name: str) -> Any:
    """The value of a setting, wherever it is kept."""
    group = _group_of_fields().get(name)
    if group is not None:
        return getattr(getattr(s, group), name)
    return getattr(s.policy_loss, name, s.core.get(name))


def holds(condition: str, s: Settings) -> bool:
    """Whether one of the condition's alternatives is true."""
    for alternative in condition.split("|"):
        name, equals, wanted = alternative.partition("=")
        value = value_of(s, name)
        if (str(value) == wanted) if equals else bool(value):
            return True
    return False


def in_words(condition: str) -> str:
    """``use_kl_loss|lr_decay_style=WSD`` -> ``--use-kl-loss or --lr-decay-style WSD``."""
    parts = [alternative.partition("=") for alternative in condition.split("|")]
    return " or ".join(f"{flag_name(name)} {value}".rstrip() for name, _, value in parts)


def declared_rules(s: Settings) -> list[Problem]:
    """What the declarations of all flags say, at most one problem for each flag."""
    found = []
    for flag in _with_declarations():
        value = value_of(s, flag.dest)
        if flag.dest not in s.given or value == flag.default:
            continue
        message = broken(flag, s)
        if message is not None:
            plain = None if value is True or isinstance(value, dict) else value
            found += problem(flag.dest, plain, message)
    return found


@cache
def _with_declarations() -> tuple[Flag, ...]:
    return tuple(f for f in flag_table().flags if f.needs or f.only_with or f.excludes)


def broken(flag: Flag, s: Settings) -> str | None:
    """The message of the first declaration that does not hold."""
    for condition in flag.excludes:
        if holds(condition, s):
            if "=" in condition:
                return f"has no effect with {in_words(condition)}; leave it out"
            return f"excludes {in_words(condition)}; give one of them"
    for condition in flag.only_with:
        if not holds(condition, s):
            return f"goes with {in_words(condition)} only; leave it out"
    for condition in flag.needs:
        if not holds(condition, s):
            return f"has no effect without {in_words(condition)}; {_remedy(condition)}"
    return None


def _remedy(condition: str) -> str:
    if "|" in condition or "=" in condition:
        return "add one of them, or leave this out" if "|" in condition else "add it"
    is_switch = flag_table().by_dest[condition].kind == "switch"
    return "add the switch" if is_switch else "give it, or leave this out"


def unknown_names() -> list[str]:
    """Names in declarations that are no settings: a mistake of ours, which a test looks for."""
    known = {flag.dest for flag in flag_table().flags}
    return [
        name
        for flag in _with_declarations()
        for condition in (*flag.needs, *flag.only_with, *flag.excludes)
        for alternative in condition.split("|")
        if (name := alternative.partition("=")[0]) not in known
    ]
