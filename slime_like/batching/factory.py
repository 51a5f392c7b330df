"""Settings of the advantage estimators, and readers of their inputs, for a run."""

from __future__ import annotations

from functools import partial

from arguments.run_config import RunConfig
from slime_like.advantages import (
    AdvantageSettings,
    TurnEstimator,
    advantage_estimators,
    follows_tokens,
)
from slime_like.batching.outcomes import OutcomeReader, reward_parts, train_rewards, within
from slime_like.rollout.hooks import processed_rewards


def advantage_settings(config: RunConfig) -> AdvantageSettings:
    """The estimator's settings, with the initial KL coefficient."""
    algorithm = config.algorithm
    distillation = config.distillation
    return AdvantageSettings(
        algorithm.advantage_estimator,
        normalize_std=not algorithm.disable_grpo_std_normalization,
        singleton=algorithm.singleton_advantage,
        normalize=algorithm.normalize_advantages,
        gamma=algorithm.gamma,
        lambd=algorithm.lambd,
        value_lambd=algorithm.value_lambd,
        lambd_length_alpha=algorithm.lambd_length_alpha,
        kl_coef=algorithm.kl_coef,
        distillation_coef=0.0 if distillation.opd_topk else distillation.opd_kl_coef,
        distillation_only=distillation.opd_only,
        prefix_gamma=distillation.opd_prefix_gamma,
    )


def outcome_readers(config: RunConfig) -> list[OutcomeReader]:
    """The outcome readers of this run, which communicate; usually none."""
    algorithm = config.algorithm
    readers = list[OutcomeReader]()
    if (path := algorithm.custom_reward_post_process_path) is not None:
        readers.append(lambda samples: {"processed": processed_rewards(config, path, samples)})
    if config.hooks.custom_convert_samples_to_train_data_path is not None:
        readers.append(lambda samples: {"processed": train_rewards(samples)})
    if (keys := algorithm.gdpo_reward_keys) is not None:
        weights = algorithm.gdpo_reward_weights or [1.0] * len(keys)
        reward_key = config.reward.reward_key
        readers.append(lambda samples: {"parts": reward_parts(keys, weights, reward_key, samples)})
    estimator = advantage_estimators.get(algorithm.advantage_estimator)
    by_turn = isinstance(estimator, TurnEstimator)
    # recordings, and samples that wait since before a restart, may be another estimator's
    is_recorded = config.debug.load_debug_rollout_data is not None
    if by_turn or follows_tokens(estimator) or config.agents.given or is_recorded:
        from slime_like.batching.turn_credit import credit_fields

        turn = config.agents.agent_turn_penalty
        token = config.agents.agent_token_penalty
        reader = partial(credit_fields, by_turn=by_turn)
        readers.append(partial(reader, turn_penalty=turn, token_penalty=token))
    return [partial(within, read, config.reward.max_abs_reward) for read in readers]
