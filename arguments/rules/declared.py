"""Rules declared with the fields: `arg(..., needs=, only_with=, excludes=, required_with=,
idle_without=)`.

A condition is the name of a setting (it is on), ``name=value``, ``name>number``, ``name<number``, a
fact about the run such as ``@experts``, or alternatives ``a|b=value``. All except `required_with`
apply only if the user gave the setting a value other than its default.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache

from arguments.flag_registry import GROUPS, FlagTable, flag_table
from arguments.flags import Flag
from arguments.rules.base import Settings, problem
from slime_like.advantages.registry import advantage_estimators, needs_critic
from slime_like.config import Problem, flag_name


def has_critic(s: Settings) -> bool:
    return not s.supervised and needs_critic(
        advantage_estimators.get(s.algorithm.advantage_estimator)
    )


# Conditions on more than a single setting -> (test, description).
FACTS: Mapping[str, tuple[Callable[[Settings], bool], str]] = {
    "@critic": (has_critic, "--advantage-estimator ppo"),
    "@pairs": (lambda s: s.algorithm.pair_loss is not None, "--loss-type dpo_loss or rm_loss"),
    "@experts": (lambda s: bool(s.core.get("num_moe_experts")), "experts in the network"),
}
# group -> condition that applies to all its settings
ONLY_WITH = {"critic": "@critic", "value_loss": "@critic"}
_ALTERNATIVE = re.compile(r"(@?\w+)(?:([=<>])(.*))?")
_KINDS = ("needs", "only_with", "excludes", "required_with", "idle_without")


@cache
def _group_of_fields() -> dict[str, str]:
    """Field name -> attribute of `Settings` that contains it."""
    return {
        field.name: group
        for group, (_, config_type) in GROUPS.items()
        for field in dataclasses.fields(config_type)
    }


def value_of(s: Settings, name: str) -> object:
    """The value of a setting in any group."""
    group = _group_of_fields().get(name)
    if group is not None:
        return getattr(getattr(s, group), name)
    default = flag_table().by_dest[name].default
    return getattr(s.policy_loss, name, s.core.get(name, default))


def parse_alternative(alternative: str) -> tuple[str, str, str]:
    """``name>1`` -> ("name", ">", "1"); for a name alone the other two parts are empty."""
    match = _ALTERNATIVE.fullmatch(alternative)
    assert match is not None, f"{alternative!r} is not a condition"
    return match[1], match[2] or "", match[3] or ""


def holds(condition: str, s: Settings) -> bool:
    """Whether one of the condition's alternatives is true."""
    return any(_is_true(*parse_alternative(part), s) for part in condition.split("|"))


def _is_true(name: str, sign: str, operand: str, s: Settings) -> bool:
    if name in FACTS:
        return FACTS[name][0](s)
    value = value_of(s, name)
    if not sign:
        return bool(value)
    if sign == "=":
        return str(value) == operand
    if not isinstance(value, int | float):
        return False
    return value > float(operand) if sign == ">" else value < float(operand)


def describe(condition: str) -> str:
    """``use_kl_loss|lr_decay_style=WSD`` -> ``--use-kl-loss or --lr-decay-style WSD``."""
    return " or ".join(_describe(*parse_alternative(part)) for part in condition.split("|"))


def _describe(name: str, sign: str, operand: str) -> str:
    if name in FACTS:
        return FACTS[name][1]
    between = {"": "", "=": " ", ">": " above ", "<": " below "}[sign]
    return f"{flag_name(name)}{between}{operand}"


def check_declared_rules(s: Settings) -> list[Problem]:
    """Problems with the declared rules of all flags, at most one per flag."""
    problems = []
    for flag in _flags_with_rules(flag_table()):
        value = value_of(s, flag.dest)
        if value is None and flag.required_with and all(holds(c, s) for c in flag.required_with):
            problems += problem(flag.dest, None, f"required with {describe(flag.required_with[0])}")
        if flag.dest not in s.given:
            continue
        message = (None if value == flag.default else violation(flag, s)) or _group_rule(flag, s)
        if message is not None:
            problems += problem(flag.dest, None if isinstance(value, dict) else value, message)
    return problems


def declared_warnings(s: Settings) -> list[str]:
    """Warnings about given settings without effect."""
    return [
        f"{flag_name(flag.dest)} has no effect without {describe(condition)}"
        for flag in flag_table().flags
        for condition in flag.idle_without
        if flag.dest in s.given and not holds(condition, s)
    ]


@lru_cache(maxsize=1)
def _flags_with_rules(table: FlagTable) -> tuple[Flag, ...]:
    groups = _group_of_fields()
    return tuple(
        flag
        for flag in table.flags
        if flag.needs
        or flag.only_with
        or flag.excludes
        or flag.required_with
        or groups.get(flag.dest) in ONLY_WITH
    )


def _group_rule(flag: Flag, s: Settings) -> str | None:
    condition = ONLY_WITH.get(_group_of_fields().get(flag.dest, ""))
    if condition is None or holds(condition, s):
        return None
    return f"only valid with {describe(condition)}; remove it"


def violation(flag: Flag, s: Settings) -> str | None:
    """The message of the flag's first declared rule that is violated; None if all hold."""
    for condition in flag.excludes:
        if holds(condition, s):
            if "=" in condition:
                return f"has no effect with {describe(condition)}; remove it"
            return f"cannot be combined with {describe(condition)}; set only one of them"
    for condition in flag.only_with:
        if not holds(condition, s):
            return f"only valid with {describe(condition)}; remove it"
    unmet = [condition for condition in flag.needs if not holds(condition, s)]
    if not unmet:
        return None
    remedy = _remedy(unmet[0]) if len(unmet) == 1 else "add them or remove this flag"
    return f"has no effect without {' and '.join(map(describe, unmet))}; {remedy}"


def _remedy(condition: str) -> str:
    if "|" in condition:
        return "add one of them or remove this flag"
    name, sign, _ = parse_alternative(condition)
    if name in FACTS:
        return "remove it"
    if sign:
        return "add it"
    is_switch = flag_table().by_dest[name].kind == "switch"
    return "add the switch" if is_switch else "set it or remove this flag"


def unknown_names() -> list[str]:
    """Names in declarations that are not settings; for a test of our own declarations."""
    known = {flag.dest for flag in flag_table().flags} | FACTS.keys()
    unknown = []
    for flag in flag_table().flags:
        for condition in (c for kind in _KINDS for c in getattr(flag, kind)):
            names = [parse_alternative(part)[0] for part in condition.split("|")]
            unknown += [name for name in names if name not in known]
    return unknown
