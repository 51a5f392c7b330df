"""Rules declared with the fields: `arg(..., needs=, only_with=, excludes=, required_with=,
idle_without=)`.

A condition is the name of a setting (it is on), ``name=value``, ``name>number``, ``name<number``, a
fact about the run such as ``@experts``, or alternatives ``a|b=value``; a reason may follow after a
comma. All except `required_with` apply only if the user gave the setting a value other than its
default. Bounds (`at_most`, `below`, `at_least`, `above`) apply if the user gave one of the two.

What needs more than this is a function in the other modules of this package.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from arguments.flag_registry import GROUPS, FlagTable, flag_table
from arguments.flags import Flag
from arguments.megatron_configs import resolve_transformer_impl
from arguments.rules.base import Settings, problem
from slime_like.advantages.registry import advantage_estimators, needs_critic
from slime_like.config import Problem, flag_name, relation_problem
from slime_like.rewards.registry import rewards
from slime_like.text import mask_settings
from slime_like.weight_sync.transports.base import transport_traits


def has_critic(s: Settings) -> bool:
    return not s.supervised and needs_critic(
        advantage_estimators.get(s.algorithm.advantage_estimator)
    )


def may_grade(s: Settings, test: Callable[[str], bool]) -> bool:
    """Whether a registered reward of which `test` is true may grade a sample: of the run, a source,
    an evaluation set, or a row."""
    named = {s.reward.rm_type}
    named.update(source.rm_type for source in s.prompt_sources)
    named.update(each.rm_type for each in s.eval_sets)
    return s.reward.rm_type_from_metadata or any(test(name) for name in named if name is not None)


def has_own_reward(s: Settings) -> bool:
    """Whether a user function may grade a sample."""
    paths = {s.reward.custom_rm_path}
    paths.update(source.custom_rm_path for source in s.prompt_sources)
    paths.update(each.custom_rm_path for each in s.eval_sets)
    return paths != {None}


# Conditions on more than a single setting -> (test, description).
FACTS: Mapping[str, tuple[Callable[[Settings], bool], str]] = {
    "@critic": (has_critic, "--advantage-estimator ppo"),
    "@pairs": (
        lambda s: s.algorithm.pair_loss is not None,
        "--loss-type dpo_loss, orpo_loss or rm_loss",
    ),
    "@experts": (lambda s: bool(s.core.get("num_moe_experts")), "experts in the network"),
    "@indexer": (
        lambda s: bool(s.core.get("index_topk") or any(s.core.get("entry_selection") or ())),
        "a network with indexers (DeepSeek-V3.2, V4, GLM-5, Qwen3.8-Flash-Next)",
    ),
    "@cuda": (lambda s: s.machine.cuda, "a CUDA device"),
    "@transformer_engine": (
        lambda s: resolve_transformer_impl(s.model, s.machine) == "transformer_engine",
        "layers of Transformer Engine",
    ),
    "@reward_model": (
        lambda s: s.algorithm.trains_reward_model,
        "--policy-loss-type bradley_terry, which trains all weights of a model without an output "
        "layer",
    ),
    "@served_teacher": (
        lambda s: s.distillation.served,
        "--opd-type sglang, which scores given tokens at temperature 1 over the full vocabulary",
    ),
    "@eval_sources": (
        lambda s: any(source.eval_path for source in s.prompt_sources),
        "an eval_path in the mix of --prompt-data",
    ),
    "@self_teacher": (lambda s: s.distillation.teaches_itself, "--opd-type self"),
    "@weight_folder": (
        lambda s: transport_traits(s.sglang.update_weight_transport).uses_folder,
        "--update-weight-transport disk",
    ),
    "@reference": (
        lambda s: s.algorithm.needs_reference,
        "--use-kl-loss, --kl-coef or --loss-type dpo_loss or kto_loss",
    ),
    "@reference_or_start": (
        lambda s: s.algorithm.needs_reference or s.starts_from_reference,
        "--use-kl-loss, --kl-coef or --loss-type dpo_loss or kto_loss; only a command line written "
        "for slime starts from its weights, unless it trains adapters",
    ),
    "@decay": (
        lambda s: s.schedule.lr_decay_style != "constant",
        "--lr-decay-style other than constant",
    ),
    "@schedule_length": (
        lambda s: (
            s.schedule.lr_decay_style != "constant"
            or s.schedule.weight_decay_incr_style != "constant"
            or s.schedule.lr_warmup_fraction is not None
        ),
        "--lr-decay-style or --weight-decay-incr-style other than constant, or "
        "--lr-warmup-fraction",
    ),
    "@wandb": (lambda s: "wandb" in s.logging.trackers, "--use-wandb or --tracker wandb"),
    "@mlflow": (lambda s: "mlflow" in s.logging.trackers, "--tracker mlflow"),
    "@tensorboard": (
        lambda s: not s.logging.no_tensorboard,
        "TensorBoard, which --no-tensorboard turns off",
    ),
    "@waiting_rewards": (
        lambda s: (
            has_own_reward(s) or may_grade(s, lambda name: rewards.get(name).connect is not None)
        ),
        "--rm-type remote_rm, judge or reward_model, or --custom-rm-path",
    ),
    "@kept_answers": (
        lambda s: may_grade(s, lambda name: rewards.get(name).keeps_answers),
        "--rm-type judge or reward_model",
    ),
    "@over_samples": (
        lambda s: (s.scheduling.over_sampling_batch_size or 0) > s.rollout.rollout_batch_size,
        "--over-sampling-batch-size above --rollout-batch-size",
    ),
}
# group -> condition that applies to all its settings
ONLY_WITH = {"critic": "@critic", "value_loss": "@critic"}
_ALTERNATIVE = re.compile(r"(@?\w+)(?:([=<>])(.*))?")
_KINDS = ("needs", "only_with", "excludes", "required_with", "idle_without")


@cache
def group_of_fields() -> dict[str, str]:
    """Field name -> attribute of `Settings` that contains it."""
    return {
        field.name: group
        for group, (_, config_type) in GROUPS.items()
        for field in dataclasses.fields(config_type)
    }


def value_of(s: Settings, name: str) -> object:
    """The value of a setting in any group."""
    group = group_of_fields().get(name)
    if group is not None:
        return getattr(getattr(s, group), name)
    default = flag_table().by_dest[name].default
    return getattr(s.policy_loss, name, s.core.get(name, default))


def _default(name: str) -> object:
    return flag_table().by_dest[name].default


def parse_alternative(alternative: str) -> tuple[str, str, str]:
    """``name>1`` -> ("name", ">", "1"); for a name alone the other two parts are empty."""
    match = _ALTERNATIVE.fullmatch(alternative)
    assert match is not None, f"{alternative!r} is not a condition"
    return match[1], match[2] or "", match[3] or ""


def without_reason(condition: str) -> tuple[str, str]:
    """``"use_opd, which samples nothing"`` -> ("use_opd", "which samples nothing")."""
    test, _, reason = condition.partition(", ")
    return test, reason


def holds(condition: str, s: Settings) -> bool:
    """Whether one of the condition's alternatives is true."""
    test, _ = without_reason(condition)
    return any(_is_true(*parse_alternative(part), s) for part in test.split("|"))


def _is_true(name: str, sign: str, operand: str, s: Settings) -> bool:
    if name in FACTS:
        return FACTS[name][0](s)
    value = value_of(s, name)
    if not sign:
        # 0 is a value of a setting that is not set by default
        return bool(value) or (value == 0 and value is not False and _default(name) is None)
    if sign == "=":
        return str(value) == operand
    if not isinstance(value, int | float):
        return False
    return value > float(operand) if sign == ">" else value < float(operand)


def describe(condition: str) -> str:
    """``use_kl_loss|lr_decay_style=WSD`` -> ``--use-kl-loss or --lr-decay-style WSD``."""
    test, _ = without_reason(condition)
    return " or ".join(_describe(*parse_alternative(part)) for part in test.split("|"))


def _describe(name: str, sign: str, operand: str) -> str:
    if name in FACTS:
        return FACTS[name][1]
    between = {"": "", "=": " ", ">": " above ", "<": " below "}[sign]
    return f"{flag_name(name)}{between}{operand}"


def check_declared_rules(s: Settings) -> list[Problem]:
    """Problems with the declared rules of all flags, at most one per flag."""
    return declared_problems(s, _flags_with_rules(flag_table()))


def flags_without(hidden: frozenset[str]) -> Iterator[Flag]:
    """The flags with declared rules, without those of `hidden` settings and without conditions on
    them. A setting that is required with a hidden one is not required."""
    for flag in _flags_with_rules(flag_table()):
        if flag.dest in hidden:
            continue
        visible: dict[str, Any] = {
            kind: tuple(c for c in getattr(flag, kind) if hidden.isdisjoint(names_in(c)))
            for kind in _KINDS
        }
        if visible["required_with"] != flag.required_with:
            visible["required_with"] = ()
        yield dataclasses.replace(flag, **visible)


def names_in(condition: str) -> set[str]:
    """The settings and facts that a condition, or the second part of a bound, is about."""
    test, _ = without_reason(condition)
    return {parse_alternative(part)[0] for part in test.split("|")}


def declared_problems(s: Settings, flags: Iterable[Flag]) -> list[Problem]:
    """Problems with the declared rules of some flags, at most one per flag."""
    problems = []
    for flag in flags:
        value = value_of(s, flag.dest)
        if value is None and flag.required_with and all(holds(c, s) for c in flag.required_with):
            required = f"required with {describe(flag.required_with[0])}"
            _, reason = without_reason(flag.required_with[0])
            problems += problem(flag.dest, None, f"{required}: {reason}" if reason else required)
        message = None
        if flag.dest in s.given:
            message = _group_rule(flag, s)
            if message is None and value != flag.default:
                message = violation(flag, s)
        message = message or _broken_relation(flag, s)
        if message is not None:
            name = flag_name(flag.dest) if value is not False else flag.name
            shown = None if isinstance(value, dict | bool) else value
            problems.append(Problem(name, shown, message))
    return problems


def _broken_relation(flag: Flag, s: Settings) -> str | None:
    """The message if two settings are not related as declared, and the flag's has an effect."""
    conditions = (*flag.needs, *flag.only_with)
    if not flag.relations or not all(holds(condition, s) for condition in conditions):
        return None
    if _group_rule(flag, s) is not None:
        return None
    for kind, names in flag.relations:
        others = [name for name in names.split("|") if value_of(s, name) is not None]
        if others and not s.given.isdisjoint({flag.dest, others[0]}):
            other = value_of(s, others[0])
            message = relation_problem(kind, value_of(s, flag.dest), others[0], other)
            if message is not None:
                return message
    return None


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
    groups = group_of_fields()
    return tuple(
        flag
        for flag in table.flags
        if flag.needs
        or flag.only_with
        or flag.excludes
        or flag.required_with
        or flag.relations
        or groups.get(flag.dest) in ONLY_WITH
    )


def _group_rule(flag: Flag, s: Settings) -> str | None:
    condition = ONLY_WITH.get(group_of_fields().get(flag.dest, ""))
    if condition is None or holds(condition, s):
        return None
    return f"only valid with {describe(condition)}; remove it"


def violation(flag: Flag, s: Settings) -> str | None:
    """The message of the flag's first declared rule that is violated; None if all hold."""
    for condition in flag.excludes:
        if holds(condition, s):
            test, reason = without_reason(condition)
            other = _described_with_value(test, s)
            if reason:
                return _with_reason(f"cannot be combined with {other}", reason)
            if "=" in test:
                return f"has no effect with {other}; remove it"
            return f"cannot be combined with {other}; set only one of them"
    for condition in flag.only_with:
        if not holds(condition, s):
            _, reason = without_reason(condition)
            return _with_reason(f"only valid with {describe(condition)}", reason)
    unmet = [condition for condition in flag.needs if not holds(condition, s)]
    if s.needs_hf_checkpoint:
        unmet = [condition for condition in unmet if names_in(condition) != {"hf_checkpoint"}]
    if not unmet:
        return None
    if without_reason(unmet[0])[1]:
        return f"requires {describe(unmet[0])}, {without_reason(unmet[0])[1]}"
    remedy = _remedy(unmet[0]) if len(unmet) == 1 else "add them or remove this flag"
    return f"has no effect without {' and '.join(map(describe, unmet))}; {remedy}"


def _described_with_value(test: str, s: Settings) -> str:
    """`describe`, with the number or word that a setting has, for a condition on one setting."""
    if not test.isidentifier():
        return describe(test)
    value = value_of(s, test)
    shown = isinstance(value, int | float | str) and not isinstance(value, bool)
    return str(mask_settings(f"{flag_name(test)} {value}")) if shown else flag_name(test)


def _with_reason(message: str, reason: str) -> str:
    """The message with its reason, which may end with a remedy in place of the usual one."""
    message = f"{message}, {reason}" if reason else message
    return message if ";" in reason else f"{message}; remove it"


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
        conditions = [c for kind in _KINDS for c in getattr(flag, kind)]
        for condition in (*conditions, *(names for _, names in flag.relations)):
            unknown += sorted(names_in(condition) - known)
    return unknown
