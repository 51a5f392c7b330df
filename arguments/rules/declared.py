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
from typing import Any

from arguments.flag_registry import GROUPS, FlagTable, flag_table
from arguments.flags import Flag
from arguments.rules.base import Settings, problem
from slime_like.advantages.registry import advantage_estimators, needs_critic
from slime_like.config import Problem, flag_name


def has_critic(s: Settings) -> bool:
    return s.algorithm.loss_type != "sft_loss" and needs_critic(
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


@cache
def _group_of_fields() -> dict[str, str]:
    """Field name -> attribute of `Settings` that contains it."""
    return {
        field.name: group
        for group, (_, config_type) in GROUPS.items()
        for field in dataclasses.fields(config_type)
    }


def value_of(s: Settings, name: str) -> Any:
    """The value of a setting in any group."""
    group = _group_of_fields().get(name)
    if group is not None:
        return getattr(getattr(s, group), name)
    default = flag_table().by_dest[name].default
    return getattr(s.policy_loss, name, s.core.get(name, default))


def parts_of(alternative: str) -> tuple[str, str, str]:
    """``name>1`` -> ("name", ">", "1"); for a name alone the other two parts are empty."""
    found = _ALTERNATIVE.fullmatch(alternative)
    assert found is not None, f"{alternative!r} is no condition"
    return found[1], found[2] or "", found[3] or ""


def holds(condition: str, s: Settings) -> bool:
    """Whether one of the condition's alternatives is true."""
    return any(_is_true(*parts_of(alternative), s) for alternative in condition.split("|"))


def _is_true(name: str, sign: str, wanted: str, s: Settings) -> bool:
    if name in FACTS:
        return FACTS[name][0](s)
    value = value_of(s, name)
    if not sign:
        return bool(value)
    if sign == "=":
        return str(value) == wanted
    return value is not None and (value > float(wanted) if sign == ">" else value < float(wanted))


def in_words(condition: str) -> str:
    """``use_kl_loss|lr_decay_style=WSD`` -> ``--use-kl-loss or --lr-decay-style WSD``."""
    return " or ".join(_words(*parts_of(alternative)) for alternative in condition.split("|"))


def _words(name: str, sign: str, wanted: str) -> str:
    if name in FACTS:
        return FACTS[name][1]
    between = {"": "", "=": " ", ">": " above ", "<": " below "}[sign]
    return f"{flag_name(name)}{between}{wanted}"


def declared_rules(s: Settings) -> list[Problem]:
    """Problems with the declared rules of all flags, at most one per flag."""
    found = []
    for flag in _with_declarations(flag_table()):
        value = value_of(s, flag.dest)
        if value is None and flag.required_with and all(holds(c, s) for c in flag.required_with):
            found += problem(
                flag.dest, None, f"is missing; {in_words(flag.required_with[0])} needs it"
            )
        if flag.dest not in s.given:
            continue
        message = (None if value == flag.default else broken(flag, s)) or _of_its_group(flag, s)
        if message is not None:
            plain = None if value is True or isinstance(value, dict) else value
            found += problem(flag.dest, plain, message)
    return found


def declared_warnings(s: Settings) -> list[str]:
    """Warnings about given settings without effect."""
    return [
        f"{flag_name(flag.dest)} has no effect without {in_words(condition)}"
        for flag in flag_table().flags
        for condition in flag.idle_without
        if flag.dest in s.given and not holds(condition, s)
    ]


@lru_cache(maxsize=1)
def _with_declarations(table: FlagTable) -> tuple[Flag, ...]:
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


def _of_its_group(flag: Flag, s: Settings) -> str | None:
    condition = ONLY_WITH.get(_group_of_fields().get(flag.dest, ""))
    if condition is None or holds(condition, s):
        return None
    return f"goes with {in_words(condition)} only; leave it out"


def broken(flag: Flag, s: Settings) -> str | None:
    """The message of the flag's first declared rule that is violated; None if all hold."""
    for condition in flag.excludes:
        if holds(condition, s):
            if "=" in condition:
                return f"has no effect with {in_words(condition)}; leave it out"
            return f"excludes {in_words(condition)}; give one of them"
    for condition in flag.only_with:
        if not holds(condition, s):
            return f"goes with {in_words(condition)} only; leave it out"
    unmet = [condition for condition in flag.needs if not holds(condition, s)]
    if not unmet:
        return None
    remedy = _remedy(unmet[0]) if len(unmet) == 1 else "add them, or leave this out"
    return f"has no effect without {' and '.join(map(in_words, unmet))}; {remedy}"


def _remedy(condition: str) -> str:
    if "|" in condition:
        return "add one of them, or leave this out"
    name, sign, _ = parts_of(condition)
    if name in FACTS:
        return "leave it out"
    if sign:
        return "add it"
    is_switch = flag_table().by_dest[name].kind == "switch"
    return "add the switch" if is_switch else "give it, or leave this out"


def unknown_names() -> list[str]:
    """Names in declarations that are not settings; for a test of our own declarations."""
    known = {flag.dest for flag in flag_table().flags} | FACTS.keys()
    return [
        name
        for flag in flag_table().flags
        for kind in ("needs", "only_with", "excludes", "required_with", "idle_without")
        for condition in getattr(flag, kind)
        for alternative in condition.split("|")
        if (name := parts_of(alternative)[0]) not in known
    ]
