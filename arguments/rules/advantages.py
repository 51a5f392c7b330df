"""Rules and warnings about advantage estimators: settings that the chosen one requires or
ignores."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from slime_like.advantages.registry import (
    OutcomeEstimator,
    TokenEstimator,
    TurnEstimator,
    advantage_estimators,
    compares_tokens,
    needs_energies,
)
from slime_like.config import Problem


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


def parts_and_weights(s: Settings) -> list[Problem]:
    """gdpo's reward components: one weight each, no duplicates, and --reward-key names the reward
    itself."""
    keys, weights = s.algorithm.gdpo_reward_keys or [], s.algorithm.gdpo_reward_weights
    if keys and s.algorithm.advantage_estimator == "gdpo" and s.reward.reward_key is None:
        message = "needs --reward-key, which of the dict is the reward that filters, metrics and evaluation go by"
        return problem("gdpo_reward_keys", " ".join(keys), message)
    if len(set(keys)) < len(keys):
        return problem("gdpo_reward_keys", " ".join(keys), "names a key twice; name each once")
    if weights is None or not keys or len(weights) == len(keys):
        return []
    given = " ".join(f"{weight:g}" for weight in weights)
    return problem(
        "gdpo_reward_weights", given, f"must be {len(keys)} numbers, one for each reward key"
    )


def normalised_twice(s: Settings) -> list[Problem]:
    if s.algorithm.advantage_estimator != "gdpo" or not s.algorithm.normalize_advantages:
        return []
    message = "does not go with --advantage-estimator gdpo, which normalises over the rollout itself; leave it out"
    return problem("normalize_advantages", None, message)


def energies_need_a_forward_pass(s: Settings) -> list[Problem]:
    name = s.algorithm.advantage_estimator
    if not s.algorithm.use_rollout_logprobs or not needs_energies(advantage_estimators.get(name)):
        return []
    message = f"does not go with --advantage-estimator {name}, which needs the trainer's own probabilities; leave it out"
    return problem("use_rollout_logprobs", None, message)


ADVANTAGE_RULES: tuple[Rule, ...] = (
    energies_need_a_forward_pass,
    whitening_is_on,
    parts_and_weights,
    normalised_twice,
)


def gdpo_of_one_reward(s: Settings) -> str | None:
    if s.algorithm.advantage_estimator != "gdpo" or s.algorithm.gdpo_reward_keys:
        return None
    return "gdpo without --gdpo-reward-keys has one reward to compare: it is grpo, normalised over the rollout once more"


def idle_advantage_settings(s: Settings) -> str | None:
    """Warn of a setting that the chosen estimator or controller ignores."""
    name = s.algorithm.advantage_estimator
    entry = advantage_estimators.get(name)
    if "gamma" in s.given and isinstance(entry, OutcomeEstimator):
        return f"--gamma has no effect with --advantage-estimator {name}, which gives all tokens of a sample one advantage"
    own = s.algorithm.value_lambd is not None and s.algorithm.lambd_length_alpha is not None
    if "lambd" in s.given and own:
        return "--lambd has no effect with both --value-lambd and --lambd-length-alpha, which are the critic's and the policy's"
    if s.algorithm.singleton_advantage == "reward" and compares_tokens(entry):
        return f"--singleton-advantage reward has no effect with --advantage-estimator {name}: a group of one has advantage 0"
    if "gamma" in s.given and name == "grpo_branch":
        return "--gamma has no effect with --advantage-estimator grpo_branch: a branch's rewards are summed"
    scales = isinstance(entry, TurnEstimator) or entry.scales_by_std
    if "disable_grpo_std_normalization" in s.given and not scales:
        return f"--disable-grpo-std-normalization has no effect with --advantage-estimator {name}"
    return None
