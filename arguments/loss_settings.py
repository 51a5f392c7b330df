"""The policy loss and its settings: --policy-loss-type, --loss-type of a preference loss, or a
custom function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

from arguments.flag_registry import FlagTable
from arguments.values import ParsedArgs
from slime_like.config import flag_name
from slime_like.losses.custom import custom_loss
from slime_like.losses.registry import PolicyLoss, policy_losses

CUSTOM = "custom_loss_function_path"
# --loss-type -> --policy-loss-type
PAIR_LOSS_TYPES = {
    "dpo_loss": "dpo",
    "orpo_loss": "orpo",
    "kto_loss": "kto",
    "rm_loss": "bradley_terry",
}


def is_supervised(values: Mapping[str, object]) -> bool:
    """Whether the run trains on given answers, before or after `resolve_loss`."""
    return values.get("loss_type") in ("sft_loss", *PAIR_LOSS_TYPES)


def resolve_loss(parsed: ParsedArgs) -> None:
    """Resolve --loss-type to a policy loss, and record contradictions."""
    _check_alias_settings(parsed)
    _resolve_custom_loss(parsed)
    _resolve_pair_loss(parsed)


def choose_loss(parsed: ParsedArgs, table: FlagTable) -> tuple[PolicyLoss, object]:
    """The policy loss, specialised by its settings, and these settings. Records problems."""
    values = parsed.values
    path = values.get(CUSTOM)
    if path is not None:
        flags = [flag for flag in table.flags if is_loss_setting(flag.dest)]
        settings = {flag.dest: values.get(flag.dest, flag.default) for flag in flags}
        try:
            return custom_loss(path), SimpleNamespace(**settings)
        except ValueError as error:
            flag = flag_name(CUSTOM)
            parsed.add_problem(flag, path, str(error).removeprefix(f"{flag} {path!r}: "))
    default = "cross_entropy" if values.get("loss_type") == "sft_loss" else "ppo"
    name = values.get("policy_loss_type", default)
    loss = policy_losses.get(name)
    values = {**loss.alias_defaults.get(name, {}), **values}
    config = loss.config_type(**{f: values[f] for f in loss_fields(loss) if f in values})
    return loss.with_config(config), config


def loss_fields(loss: PolicyLoss) -> set[str]:
    """Names of the loss's settings; a custom loss gets the settings of all losses."""
    if not dataclasses.is_dataclass(loss.config_type):
        return {name for _, registered in policy_losses.items() for name in loss_fields(registered)}
    return {field.name for field in dataclasses.fields(loss.config_type)}


def is_loss_setting(dest: str) -> bool:
    return any(dest in loss_fields(loss) for _, loss in policy_losses.items())


def _check_alias_settings(parsed: ParsedArgs) -> None:
    """Record settings that contradict the choice that a loss alias (e.g. dppo_kl) stands for."""
    name = parsed.values.get("policy_loss_type")
    if name is None:
        return
    loss = policy_losses.get(name)
    choices = {f.name for f in dataclasses.fields(loss.config_type) if f.metadata.get("choices")}
    for field, default in loss.alias_defaults.get(name, {}).items():
        if field in choices and parsed.values.get(field, default) != default:
            message = (
                f"conflicts with --policy-loss-type {name}, which sets {default}; "
                f"use --policy-loss-type {loss.name}"
            )
            parsed.add_problem(flag_name(field), parsed.values[field], message)


def _resolve_pair_loss(parsed: ParsedArgs) -> None:
    """Map --loss-type of a preference loss to --policy-loss-type; users of TRL and OpenRLHF expect
    a training mode, not a policy loss."""
    values = parsed.values
    if values.get("loss_type") not in PAIR_LOSS_TYPES:
        return
    loss_type = values["loss_type"]
    name = PAIR_LOSS_TYPES[values["loss_type"]]
    values["loss_type"] = "sft_loss"
    if policy_losses.canonical(values.setdefault("policy_loss_type", name)) != name:
        message = f"conflicts with --loss-type {loss_type}, which selects {name}; remove one"
        parsed.add_problem("--policy-loss-type", values["policy_loss_type"], message)
        values["policy_loss_type"] = name


def _resolve_custom_loss(parsed: ParsedArgs) -> None:
    """slime sets --loss-type custom_loss in addition to the path."""
    values: Mapping[str, object] = parsed.values
    if values.get("loss_type") == "custom_loss":
        parsed.values["loss_type"] = "policy_loss"
        if CUSTOM not in values:
            parsed.add_problem(flag_name(CUSTOM), None, "required with --loss-type custom_loss")
    if CUSTOM not in values:
        return
    if "policy_loss_type" in values:
        message = f"conflicts with --policy-loss-type {values['policy_loss_type']}; remove one"
        parsed.add_problem(flag_name(CUSTOM), values[CUSTOM], message)
    if values.get("loss_type") == "sft_loss":
        message = "cannot be combined with --loss-type sft_loss; remove it"
        parsed.add_problem(flag_name(CUSTOM), values[CUSTOM], message)
