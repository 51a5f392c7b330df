"""Resolve the policy loss and its settings: --policy-loss-type, slime's --advantage-estimator
gspo|cispo, or a custom function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

from arguments.aliases import ESTIMATORS_THAT_ARE_LOSSES
from arguments.flag_registry import FlagTable
from arguments.values import ParsedArgs
from slime_like.config import Problem, flag_name
from slime_like.losses.custom import custom_loss
from slime_like.losses.registry import PolicyLoss, policy_losses

CUSTOM = "custom_loss_function_path"
# --loss-type -> --policy-loss-type
PAIR_LOSS_TYPES = {"dpo_loss": "dpo", "rm_loss": "bradley_terry"}


def resolve_aliases(given: ParsedArgs) -> None:
    """Resolve aliases to the settings that they stand for, and record contradictions."""
    _estimator_picks_loss(given)
    _skyrls_gmpo_bounds(given)
    _alias_settings(given)
    _custom_loss_type(given)
    _pair_loss_type(given)


def choose_loss(given: ParsedArgs, table: FlagTable) -> tuple[PolicyLoss, object]:
    """The policy loss, specialised by its settings, and these settings. Records problems."""
    values = given.values
    path = values.get(CUSTOM)
    if path is not None:
        settings = SimpleNamespace(
            **{
                flag.dest: values.get(flag.dest, flag.default)
                for flag in table.flags
                if is_loss_setting(flag.dest)
            }
        )
        try:
            return custom_loss(path), settings
        except ValueError as error:
            given.problems.append(
                Problem(
                    flag_name(CUSTOM),
                    path,
                    str(error).removeprefix(f"{flag_name(CUSTOM)} {path!r}: "),
                )
            )
    name = values.get(
        "policy_loss_type", "cross_entropy" if values.get("loss_type") == "sft_loss" else "ppo"
    )
    loss = policy_losses.get(name)
    said = {**loss.alias_defaults.get(name, {}), **values}
    settings = loss.config_type(**{f: said[f] for f in loss_fields(loss) if f in said})
    return loss.with_config(settings), settings


def loss_fields(loss: PolicyLoss) -> set[str]:
    """Names of the loss's settings; a custom loss gets the settings of all losses."""
    if not dataclasses.is_dataclass(loss.config_type):
        return {name for _, registered in policy_losses.items() for name in loss_fields(registered)}
    return {field.name for field in dataclasses.fields(loss.config_type)}


def is_loss_setting(dest: str) -> bool:
    return any(dest in loss_fields(loss) for _, loss in policy_losses.items())


def _estimator_picks_loss(given: ParsedArgs) -> None:
    """In slime, --advantage-estimator gspo|cispo also selects the loss. gspo together with sapo
    means SAPO with GSPO's ratio."""
    values = given.values
    name = values.get("advantage_estimator")
    if name not in ESTIMATORS_THAT_ARE_LOSSES:
        return
    values["advantage_estimator"] = "grpo"
    if CUSTOM in values:
        return
    chosen = policy_losses.canonical(values.setdefault("policy_loss_type", name))
    if chosen == "sapo" and name == "gspo":
        values.setdefault("sapo_ratio_level", "sequence")
    elif chosen != name:
        message = f"chooses the loss {name} and contradicts --policy-loss-type {chosen}; use --advantage-estimator grpo with that loss"
        given.problems.append(Problem("--advantage-estimator", name, message))
    elif name == "cispo":
        _slimes_cispo_bounds(given)


def _slimes_cispo_bounds(given: ParsedArgs) -> None:
    """slime's cispo uses --eps-clip as its bounds; ours has separate flags."""
    values = given.values
    low = values.pop("eps_clip", None)
    high = values.pop("eps_clip_high", low)
    if low is not None:
        values.setdefault("cispo_eps_clip_low", low)
    if high is not None:
        values.setdefault("cispo_eps_clip_high", high)
    if low is not None and values["cispo_eps_clip_low"] < 1:
        given.warnings.append(
            f"--eps-clip {low:g} bounds cispo's weight below at {1 - values['cispo_eps_clip_low']:g}; the paper has no lower bound: "
            "--cispo-eps-clip-low 1"
        )


def _skyrls_gmpo_bounds(given: ParsedArgs) -> None:
    """SkyRL's gmpo uses eps_clip_low and eps_clip_high as its bounds; ours has separate flags."""
    values = given.values
    name = values.get("policy_loss_type")
    if name is None or policy_losses.canonical(name) != "gmpo":
        return
    for field, own in (("eps_clip", "gmpo_eps_low"), ("eps_clip_high", "gmpo_eps_high")):
        if field in values:
            values.setdefault(own, values.pop(field))


def _alias_settings(given: ParsedArgs) -> None:
    """Record settings that contradict the choice that a loss alias (e.g. dppo_kl) stands for."""
    name = given.values.get("policy_loss_type")
    if name is None:
        return
    loss = policy_losses.get(name)
    choices = {f.name for f in dataclasses.fields(loss.config_type) if f.metadata.get("choices")}
    for field, meant in loss.alias_defaults.get(name, {}).items():
        if field in choices and given.values.get(field, meant) != meant:
            message = f"contradicts --policy-loss-type {name}, which means {meant}; use --policy-loss-type {loss.name}"
            given.problems.append(Problem(flag_name(field), given.values[field], message))


def _pair_loss_type(given: ParsedArgs) -> None:
    """Map --loss-type of a preference loss to --policy-loss-type; users of TRL and OpenRLHF expect
    a training mode, not a policy loss."""
    values = given.values
    if values.get("loss_type") not in PAIR_LOSS_TYPES:
        return
    given_type, name = values["loss_type"], PAIR_LOSS_TYPES[values["loss_type"]]
    values["loss_type"] = "sft_loss"
    if policy_losses.canonical(values.setdefault("policy_loss_type", name)) != name:
        message = f"contradicts --loss-type {given_type}, which means {name}; leave one of them out"
        given.problems.append(Problem("--policy-loss-type", values["policy_loss_type"], message))
        values["policy_loss_type"] = name


def _custom_loss_type(given: ParsedArgs) -> None:
    """slime sets --loss-type custom_loss in addition to the path."""
    values: Mapping[str, object] = given.values
    if values.get("loss_type") == "custom_loss":
        given.values["loss_type"] = "policy_loss"
        if CUSTOM not in values:
            given.problems.append(
                Problem(flag_name(CUSTOM), None, "is missing; --loss-type custom_loss needs it")
            )
    if CUSTOM not in values:
        return
    if "policy_loss_type" in values:
        message = f"contradicts --policy-loss-type {values['policy_loss_type']}; give one of them"
        given.problems.append(Problem(flag_name(CUSTOM), values[CUSTOM], message))
    if values.get("loss_type") == "sft_loss":
        given.problems.append(
            Problem(
                flag_name(CUSTOM),
                values[CUSTOM],
                "does not go with --loss-type sft_loss; leave it out",
            )
        )
