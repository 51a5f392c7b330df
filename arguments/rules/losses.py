"""Rules and warnings about policy losses, their reduction and the terms beside them."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from arguments.rules.batches import global_batch_of
from slime_like.advantages.registry import (
    OutcomeEstimator,
    advantage_estimators,
    compares_samples,
    needs_critic,
)
from slime_like.config import Problem

WIDE_FOR_A_GEOMETRIC_MEAN = 0.01


def dro_needs_beta(s: Settings) -> list[Problem]:
    if s.loss.name == "dro" and s.policy_loss.dro_beta is None:
        return problem(
            "dro_beta",
            None,
            "is missing; --policy-loss-type dro needs the weight of its squared log-ratio, > 0",
        )
    return []


def sequence_mask(s: Settings) -> list[Problem]:
    if not s.algorithm.use_opsm:
        return []
    if s.algorithm.loss_type == "sft_loss" or s.loss.correction == "forbidden":
        return problem(
            "use_opsm",
            None,
            f"does not go with the loss {s.loss.name}, which has no old policy; leave it out",
        )
    return []


def legacy_needs_even_micro_batches(s: Settings) -> list[Problem]:
    size, dp, micro = global_batch_of(s), s.data_parallel_size, s.algorithm.micro_batch_size
    if (
        s.algorithm.loss_reduction != "token_mean_legacy"
        or size is None
        or dp is None
        or size % (dp * micro) == 0
    ):
        return []
    if s.algorithm.use_dynamic_batch_size:
        return []  # has its own rule
    message = f"needs an optimizer step of whole micro-batches, and {size} samples are not divisible by {dp} data-parallel ranks x {micro}"
    return problem("loss_reduction", "token_mean_legacy", f"{message}; use token_mean")


def entropy_bounds(s: Settings) -> list[Problem]:
    """An adaptive coefficient starts and stays between its bounds."""
    a = s.algorithm
    if a.entropy_ctrl_type != "adaptive":
        return []
    if a.entropy_coef_min > a.entropy_coef_max:
        message = f"must not be above --entropy-coef-max {a.entropy_coef_max:g}"
        return problem("entropy_coef_min", a.entropy_coef_min, message)
    if not a.entropy_coef_min <= a.entropy_coef <= a.entropy_coef_max:
        message = f"is where the adaptive coefficient starts; it must be from {a.entropy_coef_min:g} to {a.entropy_coef_max:g}"
        return problem("entropy_coef", a.entropy_coef, message)
    return []


LOSS_RULES: tuple[Rule, ...] = (
    entropy_bounds,
    dro_needs_beta,
    sequence_mask,
    legacy_needs_even_micro_batches,
)


def wide_gspo_range(s: Settings) -> str | None:
    if s.loss.name != "gspo":
        return None
    widest = max(s.policy_loss.eps_clip, s.policy_loss.eps_clip_high or 0.0)
    if widest <= WIDE_FOR_A_GEOMETRIC_MEAN:
        return None
    return f"gspo's ratio is a geometric mean over the sequence, close to 1: a clip range of {widest:g} never acts; try --eps-clip 3e-4 --eps-clip-high 4e-4"


def gmpo_needs_one_advantage(s: Settings) -> str | None:
    """Outcome estimators give all tokens of a sample one; whitening keeps that."""
    name = s.algorithm.advantage_estimator
    if s.loss.name != "gmpo" or isinstance(advantage_estimators.get(name), OutcomeEstimator):
        return None
    return f"gmpo is defined for one advantage in each sequence, and --advantage-estimator {name} gives each token its own"


def sapo_needs_a_group(s: Settings) -> str | None:
    """SAPO's temperatures are for advantages that are centred within a prompt's group."""
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if s.loss.name != "sapo" or (compares_samples(entry) and not needs_critic(entry)):
        return None
    why = "takes its baseline from a critic" if needs_critic(entry) else "has no group"
    return (
        f"--policy-loss-type sapo is defined for advantages of a group, and "
        f"--advantage-estimator {name} {why}; see --advantage-estimator grpo"
    )
