"""Settings of losses that slime and SkyRL express in another way."""

from __future__ import annotations

from arguments.loss_settings import CUSTOM
from arguments.translate.names import ESTIMATORS_THAT_ARE_LOSSES
from arguments.values import ParsedArgs
from slime_like.config import flag_name
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.registry import policy_losses


def translate_losses(parsed: ParsedArgs) -> None:
    """Replace what stands for a loss or its settings; records contradictions."""
    _resolve_estimator(parsed)
    _resolve_gmpo_bounds(parsed)
    _resolve_icepop(parsed)
    _resolve_kl_in_reward(parsed)


def _resolve_estimator(parsed: ParsedArgs) -> None:
    """In slime, --advantage-estimator gspo|cispo also selects the loss. gspo together with sapo
    means SAPO with GSPO's ratio."""
    values = parsed.values
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
        message = (
            f"selects the loss {name} and conflicts with --policy-loss-type {chosen}; "
            "use --advantage-estimator grpo with that loss"
        )
        parsed.add_problem("--advantage-estimator", name, message)
    elif name == "cispo":
        _resolve_cispo_bounds(parsed)


def _resolve_cispo_bounds(parsed: ParsedArgs) -> None:
    """slime's cispo uses --eps-clip as its bounds; ours has separate flags."""
    values = parsed.values
    low = parsed.values.get("eps_clip")
    # the warning below asks for an own bound in addition to slime's
    _rename_bounds(parsed, "cispo_eps_clip_low", "cispo_eps_clip_high", both_legal=True)
    if low is not None and values["cispo_eps_clip_low"] < 1:
        bound = 1 - values["cispo_eps_clip_low"]
        parsed.warnings.append(
            f"--eps-clip {low:g} bounds the cispo weight below at {bound:g}; the paper has no "
            "lower bound: --cispo-eps-clip-low 1"
        )


def _resolve_gmpo_bounds(parsed: ParsedArgs) -> None:
    """SkyRL's gmpo uses eps_clip_low and eps_clip_high as its bounds; ours has separate flags."""
    name = parsed.values.get("policy_loss_type")
    if name is not None and policy_losses.canonical(name) == "gmpo":
        _rename_bounds(parsed, "gmpo_eps_low", "gmpo_eps_high")


def _rename_bounds(parsed: ParsedArgs, low: str, high: str, *, both_legal: bool = False) -> None:
    """--eps-clip and --eps-clip-high as the bounds `low` and `high` of a loss that has its own. As
    for the other losses, the upper one defaults to the lower one. Records contradictions, unless
    own bounds are legal in addition."""
    values = parsed.values
    if "eps_clip" in values and high not in values:
        values.setdefault("eps_clip_high", values["eps_clip"])
    for shared, own in (("eps_clip", low), ("eps_clip_high", high)):
        if shared not in values:
            continue
        value = values.pop(shared)
        if values.setdefault(own, value) != value and not both_legal:
            message = f"conflicts with {flag_name(shared)} {value:g}; keep one of them"
            parsed.add_problem(flag_name(own), values[own], message)


def _resolve_icepop(parsed: ParsedArgs) -> None:
    """Replace slime's icepop_function by our IcePop: a token mask and truncated importance sampling
    with the same bounds."""
    values = parsed.values
    path = str(values.get("custom_tis_function_path", ""))
    if not path.endswith("icepop_function"):
        return
    del values["custom_tis_function_path"]
    if values.get("tis_ratio_type") != "token":
        message = "has no effect without --use-tis; add it"
        parsed.add_problem("--custom-tis-function-path", path, message)
    for side in ("low", "high"):
        field = f"token_tis_ratio_clip_{side}"
        bound = values.get(field, getattr(OffPolicyConfig(), field))
        name = f"token_mask_is_threshold_{side}"
        if values.setdefault(name, bound) != bound:
            flag = "--tis-clip-low" if side == "low" else "--tis-clip"
            message = f"conflicts with {flag} {bound:g}, which is IcePop's bound; remove it"
            parsed.add_problem(flag_name(name), values[name], message)


def _resolve_kl_in_reward(parsed: ParsedArgs) -> None:
    """With SkyRL's use_kl_in_reward, its kl_loss_coef is our kl_coef."""
    values = parsed.values
    if values.pop("use_kl_in_reward", None) and "kl_coef" not in values:
        if "kl_loss_coef" in values:
            values["kl_coef"] = values.pop("kl_loss_coef")
        else:
            parsed.add_problem("--use-kl-in-reward", None, "requires a weight; use --kl-coef")
