"""Rules and warnings about advantage estimators: settings that the chosen one requires or
ignores."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, Warn, problem
from slime_like.advantages.registry import (
    AdvantageEstimator,
    OutcomeEstimator,
    TokenEstimator,
    TurnEstimator,
    advantage_estimators,
    compares_samples,
    discounts,
    handles_singletons,
    needs_energies,
)
from slime_like.config import Problem


def check_whitening(s: Settings) -> list[Problem]:
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    whitens = isinstance(entry, TokenEstimator) and entry.whitens
    if not whitens or s.algorithm.normalize_advantages or s.supervised:
        return []
    return problem("normalize_advantages", None, f"required with --advantage-estimator {name}")


def check_gdpo_rewards(s: Settings) -> list[Problem]:
    """gdpo's reward components: one weight each, no duplicates."""
    keys = s.algorithm.gdpo_reward_keys or []
    weights = s.algorithm.gdpo_reward_weights
    if len(set(keys)) < len(keys):
        return problem("gdpo_reward_keys", " ".join(keys), "has duplicate keys; remove them")
    if weights is None or not keys or len(weights) == len(keys):
        return []
    text = " ".join(f"{weight:g}" for weight in weights)
    return problem("gdpo_reward_weights", text, f"must be {len(keys)} numbers, one per reward key")


def check_energies(s: Settings) -> list[Problem]:
    name = s.algorithm.advantage_estimator
    if not s.algorithm.use_rollout_logprobs or not needs_energies(advantage_estimators.get(name)):
        return []
    message = (
        f"cannot be combined with --advantage-estimator {name}, which needs the trainer's "
        "probabilities; remove it"
    )
    return problem("use_rollout_logprobs", None, message)


ADVANTAGE_RULES: tuple[Rule, ...] = (
    check_energies,
    check_whitening,
    check_gdpo_rewards,
)


def warn_gdpo_single_reward(s: Settings) -> str | None:
    if s.algorithm.advantage_estimator != "gdpo" or s.algorithm.gdpo_reward_keys:
        return None
    return (
        "--advantage-estimator gdpo without --gdpo-reward-keys has a single reward: it is grpo, "
        "normalised over the rollout once more"
    )


def _chosen(s: Settings) -> tuple[AdvantageEstimator, str]:
    """The estimator, and its flag."""
    name = s.algorithm.advantage_estimator
    return advantage_estimators.get(name), f"--advantage-estimator {name}"


def warn_idle_gamma(s: Settings) -> str | None:
    entry, estimator = _chosen(s)
    if "gamma" not in s.given or discounts(entry):
        return None
    reason = "one advantage for all tokens of a sample"
    if not isinstance(entry, OutcomeEstimator):
        reason = "no reward counts for an earlier token"
    if isinstance(entry, TurnEstimator):
        reason = "a branch's rewards are summed"
    return f"--gamma has no effect with {estimator}: {reason}"


def warn_idle_lambd(s: Settings) -> str | None:
    both = s.algorithm.value_lambd is not None and s.algorithm.lambd_length_alpha is not None
    if "lambd" not in s.given or not both:
        return None
    return "--lambd has no effect with both --value-lambd and --lambd-length-alpha"


def warn_idle_singleton_advantage(s: Settings) -> str | None:
    entry, estimator = _chosen(s)
    if s.algorithm.singleton_advantage != "reward" or handles_singletons(entry):
        return None
    reason = "it compares no samples of a prompt"
    if compares_samples(entry):
        reason = "a group of one has advantage 0"
    return f"--singleton-advantage reward has no effect with {estimator}: {reason}"


def warn_idle_std_normalization(s: Settings) -> str | None:
    entry, estimator = _chosen(s)
    scales = isinstance(entry, TurnEstimator) or entry.scales_by_std
    if "disable_grpo_std_normalization" not in s.given or scales:
        return None
    return f"--disable-grpo-std-normalization has no effect with {estimator}"


ADVANTAGE_WARNINGS: tuple[Warn, ...] = (
    warn_gdpo_single_reward,
    warn_idle_gamma,
    warn_idle_lambd,
    warn_idle_singleton_advantage,
    warn_idle_std_normalization,
)
