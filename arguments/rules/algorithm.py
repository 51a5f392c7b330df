"""Rules about advantages and the off-policy correction."""

from __future__ import annotations

import dataclasses

from arguments.rules.base import Rule, Settings, problem
from slime_like.advantages.registry import OutcomeEstimator, TokenEstimator, advantage_estimators
from slime_like.config import Problem, flag_name
from slime_like.import_utils import load_function
from slime_like.losses.off_policy import OffPolicyConfig

# --- off-policy correction -------------------------------------------------------------------------------------------

CUSTOM_TIS_TAKES = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "token_tis_ratio_clip_low",
    "custom_tis_function_path",
)


def first_correction(config: OffPolicyConfig) -> str:
    """The flag of a correction that is on."""
    keys = ("tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
            "token_mask_is_threshold_low", "token_mask_is_threshold_high", "rejection_metric", "m2po_threshold", "custom_tis_function_path")  # fmt: skip
    return flag_name(next(key for key in keys if getattr(config, key) is not None))


def correction_has_two_policies(s: Settings) -> list[Problem]:
    if s.off_policy.enabled and s.algorithm.use_rollout_logprobs:
        message = f"contradicts {first_correction(s.off_policy)}: the old log-probs are the sampler's, so there is nothing to correct; leave one out"
        return problem("use_rollout_logprobs", None, message)
    return []


def correction_fits_the_loss(s: Settings) -> list[Problem]:
    if not s.off_policy.enabled:
        return []
    if s.algorithm.loss_type == "sft_loss" or s.loss.correction == "forbidden":
        name = "cross_entropy" if s.algorithm.loss_type == "sft_loss" else s.loss.name
        found = Problem(
            first_correction(s.off_policy),
            None,
            f"does not go with the loss {name}, which has no old policy; leave it out",
        )
        return [found]
    if s.off_policy.weights and s.loss.correction == "masks":
        name = (
            "tis_ratio_type"
            if s.off_policy.tis_ratio_type is not None
            else "custom_tis_function_path"
        )
        message = f"does not go with --policy-loss-type {s.loss.name}, whose ratio is against the sampler: the mismatch would count double"
        return problem(name, getattr(s.off_policy, name), f"{message}; leave it out, or use masks")
    return []


def correction_bounds(s: Settings) -> list[Problem]:
    """low <= high, and both of a pair that goes together."""
    return s.off_policy.conflicts()


def custom_tis(s: Settings) -> list[Problem]:
    path = s.off_policy.custom_tis_function_path
    if path is None:
        return []
    if s.off_policy.tis_ratio_type != "token":
        return problem("custom_tis_function_path", path, "has no effect without --use-tis; add it")
    others = [
        f.name
        for f in dataclasses.fields(OffPolicyConfig)
        if f.name in s.given and f.name not in CUSTOM_TIS_TAKES
    ]
    if others:
        return problem(
            "custom_tis_function_path",
            path,
            f"makes weights and masks itself; leave {flag_name(others[0])} out",
        )
    try:
        load_function(path, "--custom-tis-function-path")
    except ValueError as error:
        return problem(
            "custom_tis_function_path",
            path,
            str(error).removeprefix(f"--custom-tis-function-path {path!r}: "),
        )
    return []


CORRECTION_RULES: tuple[Rule, ...] = (
    correction_has_two_policies,
    correction_fits_the_loss,
    correction_bounds,
    custom_tis,
)


# --- advantages ------------------------------------------------------------------------------------------------------


def whitening_is_on(s: Settings) -> list[Problem]:
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if (
        isinstance(entry, TokenEstimator)
        and entry.whitens
        and not s.algorithm.normalize_advantages
        and s.algorithm.loss_type != "sft_loss"
    ):
        return problem(
            "normalize_advantages",
            None,
            f"is missing; --advantage-estimator {name} is defined with it",
        )
    return []


def adaptive_kl_has_a_start(s: Settings) -> list[Problem]:
    if s.algorithm.kl_ctrl_type == "adaptive" and not s.algorithm.kl_coef:
        return problem(
            "kl_ctrl_type",
            "adaptive",
            "needs --kl-coef above 0 to start from: it changes the weight of the KL in the reward",
        )
    return []


ADVANTAGE_RULES: tuple[Rule, ...] = (whitening_is_on, adaptive_kl_has_a_start)

# --- warnings --------------------------------------------------------------------------------------------------------


def idle_advantage_settings(s: Settings) -> str | None:
    """A setting that the chosen estimator or controller does not read."""
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if "gamma" in s.given and isinstance(entry, OutcomeEstimator):
        return f"--gamma has no effect with --advantage-estimator {name}, which gives all tokens of a sample one advantage"
    if "disable_grpo_std_normalization" in s.given and name != "grpo":
        return f"--disable-grpo-std-normalization has no effect with --advantage-estimator {name}"
    for field in ("kl_target", "kl_horizon"):
        if field in s.given and s.algorithm.kl_ctrl_type != "adaptive":
            return f"{flag_name(field)} has no effect without --kl-ctrl-type adaptive"
    for field in ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"):
        if field in s.given and s.algorithm.entropy_ctrl_type != "adaptive":
            return f"{flag_name(field)} has no effect without --entropy-ctrl-type adaptive"
    return None


# What a setting of the correction needs to have an effect.
_PARTS = {
    "token_tis_ratio_clip_": ("--tis-ratio-type token", lambda c: c.tis_ratio_type == "token"),
    "sequence_tis_ratio_clip_": (
        "--tis-ratio-type sequence",
        lambda c: c.tis_ratio_type == "sequence",
    ),
    "tis_batch_": ("--tis-ratio-type", lambda c: c.tis_ratio_type is not None),
    "geo_mask_": (
        "--sequence-mask-metric geometric",
        lambda c: c.sequence_mask_metric == "geometric",
    ),
    "product_mask_": (
        "--sequence-mask-metric product",
        lambda c: c.sequence_mask_metric == "product",
    ),
}


def idle_correction_settings(s: Settings) -> str | None:
    """A bound was given, and what it bounds is off."""
    for name in sorted(s.given & {f.name for f in dataclasses.fields(OffPolicyConfig)}):
        for prefix, (needs, holds) in _PARTS.items():
            if name.startswith(prefix) and not holds(s.off_policy):
                return f"{flag_name(name)} has no effect without {needs}"
    return None
