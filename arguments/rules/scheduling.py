"""Rules about rollout scheduling: what is sampled, filtered and carried over between rollouts."""

from __future__ import annotations

import dataclasses
import inspect

from arguments.rules.base import Rule, Settings, import_or_none, import_problem, problem, reject
from slime_like.advantages.registry import TokenEstimator, advantage_estimators, compares_samples
from slime_like.config import Problem, flag_name
from slime_like.engines.registry import engine_traits
from slime_like.import_utils import takes_args

BUILT_IN_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."
FILTERS = (
    BUILT_IN_FILTERS + "check_reward_nonzero_std",
    BUILT_IN_FILTERS + "check_reward_nonzero_std_with_fallback",
)
CUSTOM_GENERATE = "custom_generate_function_path"
ROLLOUT_FUNCTION = "rollout_function_path"
EVAL_FUNCTION = "eval_function_path"
PATHS = (
    "dynamic_sampling_filter_path",
    "buffer_filter_path",
    "rollout_sample_filter_path",
    CUSTOM_GENERATE,
    ROLLOUT_FUNCTION,
    "data_source_path",
)
OWN_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"  # the built-in default
# slime's rollout functions that are built in under other flags -> what to use
OTHER_ROLLOUTS = {
    "slime.rollout.fully_async_rollout.": "use --async-rollout --fully-async",
    "slime.rollout.sft_rollout.": "--loss-type sft_loss needs no function",
    "slime.rollout.forge_load.": "use --load-debug-rollout-data",
}
SAMPLING_SETTINGS = (
    "over_sampling_batch_size",
    "partial_rollout",
    "mask_offpolicy_in_partial_rollout",
    "rollout_slice_len",
    "rollout_time_limit_s",
    "async_rollout",
    "fully_async",
    *PATHS,
)


def check_sampling_settings(s: Settings) -> list[Problem]:
    if s.generates:
        return []
    of_evaluation = (CUSTOM_GENERATE, ROLLOUT_FUNCTION) if s.evaluates else ()
    names = [name for name in SAMPLING_SETTINGS if name not in of_evaluation]
    return reject(
        {name: getattr(s.scheduling, name) for name in names},
        "has no effect: this run samples no rollouts; remove it",
    )


def check_scheduling_functions(s: Settings) -> list[Problem]:
    """User functions of rollout scheduling and evaluation can be imported."""
    problems = []
    for name in (*PATHS, EVAL_FUNCTION) if s.generates or s.evaluates else ():
        path = getattr(s.scheduling, name)
        if path is None or path in FILTERS or path.startswith((OWN_ROLLOUT, *OTHER_ROLLOUTS)):
            continue
        problems += import_problem(name, path)
    return problems


def check_filter_of_groups(s: Settings) -> list[Problem]:
    """The built-in filters compare the rewards of a group, and drop those of one sample."""
    path = s.scheduling.dynamic_sampling_filter_path
    custom = s.scheduling.custom_generate_function_path or s.scheduling.rollout_function_path
    if path not in FILTERS or s.rollout.n_samples_per_prompt > 1 or custom or not s.generates:
        return []
    return problem(
        "dynamic_sampling_filter_path",
        path,
        "compares the samples of a prompt, of which --n-samples-per-prompt 1 has one; raise it, or "
        "remove the filter",
    )


def check_custom_generate(s: Settings) -> list[Problem]:
    """A custom generate function must be async, and is incompatible with generating in slices."""
    path = s.scheduling.custom_generate_function_path
    if path is None or not (s.generates or s.evaluates):
        return []
    function = import_or_none(CUSTOM_GENERATE, path)
    if function is None:
        return []
    problems = []
    if not inspect.iscoroutinefunction(function):
        problems += problem(CUSTOM_GENERATE, path, "must be an async function")
    flag = flag_name(CUSTOM_GENERATE)
    if s.scheduling.partial_rollout or s.scheduling.rollout_slice_len is not None:
        name = "partial_rollout" if s.scheduling.partial_rollout else "rollout_slice_len"
        message = f"cannot be combined with {flag}, whose responses have no slices"
        problems += problem(name, None, message)
    replayed = {
        "renormalize_sampled_log_probs": s.rollout.renormalize_sampled_log_probs,
        "use_rollout_routing_replay": s.rollout.use_rollout_routing_replay,
        "use_rollout_indexer_replay": s.rollout.use_rollout_indexer_replay,
    }
    if any(replayed.values()) and takes_args(function):
        message = (
            f"not supported by {flag} in slime's convention, whose samples do not have the data; "
            "write it as function(model, episode)"
        )
        problems += reject(replayed, message)
    return problems


def _check_function_types(s: Settings) -> list[Problem]:
    """Rollout functions that are slime's own or async, which are not supported."""
    problems: list[Problem] = []
    for name in (ROLLOUT_FUNCTION, EVAL_FUNCTION):
        path = getattr(s.scheduling, name)
        if path is None or path == OWN_ROLLOUT:
            continue
        hints = [hint for prefix, hint in OTHER_ROLLOUTS.items() if path.startswith(prefix)]
        if hints:
            problems += problem(name, path, f"is slime's own and not supported: {hints[0]}")
        elif (s.generates or s.evaluates) and _is_async(name, path):
            message = "must not be async; await in it with slime_like.compat.slime.api.run"
            problems += problem(name, path, message)
    return problems


def _is_async(name: str, path: str) -> bool:
    return inspect.iscoroutinefunction(import_or_none(name, path))


def check_rollout_functions(s: Settings) -> list[Problem]:
    """Problems of rollout and evaluation functions, and settings incompatible with them."""
    config = s.scheduling
    problems = _check_function_types(s)
    has_function = config.rollout_function_path not in (None, OWN_ROLLOUT)
    if has_function or config.data_source_path is not None:
        flag = flag_name(ROLLOUT_FUNCTION if has_function else "data_source_path")
        unsupported = {"rollout_slice_len": config.rollout_slice_len, **_replayed(s)}
        return problems + reject(unsupported, f"cannot be combined with {flag}; remove one of them")
    timeout = config.rollout_function_timeout_s
    name = "rollout_function_timeout_s"
    if name in s.given and config.eval_function_path in (None, OWN_ROLLOUT):
        message = "has no effect without --rollout-function-path or --eval-function-path; remove it"
        problems += problem(name, timeout, message)
    return problems


def _replayed(s: Settings) -> dict[str, object]:
    """Settings that need more than a whole response from the engine, with their values."""
    estimator = advantage_estimators.get(s.algorithm.advantage_estimator)
    needs_greedy = isinstance(estimator, TokenEstimator) and estimator.needs_greedy
    return {
        "renormalize_sampled_log_probs": s.rollout.renormalize_sampled_log_probs,
        "use_rollout_routing_replay": s.rollout.use_rollout_routing_replay,
        "use_rollout_indexer_replay": s.rollout.use_rollout_indexer_replay,
        "advantage_estimator": s.algorithm.advantage_estimator if needs_greedy else None,
    }


def check_rollout_time_limit(s: Settings) -> list[Problem]:
    """--rollout-time-limit-s needs an engine with single requests, which can be aborted."""
    limit = s.scheduling.rollout_time_limit_s
    config = s.scheduling
    if limit is None:
        return []
    if not engine_traits(s.rollout.rollout_engine).aborts_requests:
        message = "requires --rollout-engine sglang or vllm; use --rollout-max-response-len instead"
        return problem("rollout_time_limit_s", limit, message)
    if config.rollout_function_path not in (None, OWN_ROLLOUT):
        message = "has no effect on --rollout-function-path; remove one of them"
        return problem("rollout_time_limit_s", limit, message)
    unsupported = {"rollout_slice_len": config.rollout_slice_len, **_replayed(s)}
    return reject(unsupported, "cannot be combined with --rollout-time-limit-s; remove one of them")


def check_fully_async(s: Settings) -> list[Problem]:
    """--fully-async needs a rollout's time to be older, and whole requests from servers."""
    config = s.scheduling
    if not config.fully_async:
        return []
    problems = []
    if config.max_staleness == 0:
        message = "must be at least 1 with --fully-async, whose episodes outlive a rollout"
        problems += problem("max_staleness", 0, message)
    over_sampled = (config.over_sampling_batch_size or 0) > s.rollout.rollout_batch_size
    if over_sampled:
        message = (
            "has no effect with --fully-async, which drops no group that has begun; use "
            "--num-parallel-generation-workers"
        )
        value = config.over_sampling_batch_size
        problems += problem("over_sampling_batch_size", value, message)
    if config.dynamic_sampling_filter_path == FILTERS[1]:
        message = (
            "drops only what --over-sampling-batch-size has left over, and --fully-async has "
            f"nothing left over; use {FILTERS[0]}"
        )
        problems += problem("dynamic_sampling_filter_path", FILTERS[1], message)
    unsupported: dict[str, object] = {}
    traits = engine_traits(s.rollout.rollout_engine)
    if traits.has_servers and not traits.aborts_requests:
        unsupported = {"rollout_engine": s.rollout.rollout_engine}
    elif traits.has_servers:
        unsupported = {"rollout_slice_len": config.rollout_slice_len, **_replayed(s)}
    elif _replayed(s)["advantage_estimator"]:
        unsupported = {"advantage_estimator": s.algorithm.advantage_estimator}
    message = "cannot be combined with --fully-async on this engine; remove one of them"
    return problems + reject(unsupported, message)


def check_single_samples(s: Settings) -> list[Problem]:
    """--fully-async-single-samples takes groups apart, which nothing else may need."""
    if not (s.scheduling.fully_async and s.scheduling.fully_async_single_samples):
        return []
    a = s.algorithm
    apart = "cannot be combined with --fully-async-single-samples, which takes groups apart; "
    problems = []
    compares = compares_samples(advantage_estimators.get(a.advantage_estimator))
    if compares and s.hooks.custom_advantage_function_path is None:
        message = apart + "take batch_mean, reinforce_plus_plus or ppo, or whole groups"
        problems += problem("advantage_estimator", a.advantage_estimator, message)
    if a.loss_reduction == "prompt_mean":
        message = apart + "it averages over the samples of a prompt"
        problems += problem("loss_reduction", a.loss_reduction, message)
    curricula = [source.name for source in s.prompt_sources if source.learns_from_rewards]
    if curricula:
        message = apart + f"{', '.join(curricula)} need the pass rates of whole ones"
        problems += problem("prompt_data", s.data.prompt_data, message)
    return problems


def check_hooks(s: Settings) -> list[Problem]:
    """Training and logging hooks can be imported, and are compatible with the run."""
    problems = []
    for field in dataclasses.fields(s.hooks):
        value = getattr(s.hooks, field.name)
        for path in [value] if isinstance(value, str) else value or ():
            problems += import_problem(field.name, path)
    if s.hooks.custom_pg_loss_reducer_function_path is not None and not s.loss.homogeneous:
        message = (
            f"cannot be combined with --policy-loss-type {s.loss.name}, which is not linear in its "
            "advantages; remove it"
        )
        problems += problem("custom_pg_loss_reducer_function_path", None, message)
    path = s.algorithm.custom_reward_post_process_path
    if path is not None and s.trains and not s.supervised:
        problems += import_problem("custom_reward_post_process_path", path)
    return problems


SCHEDULING_RULES: tuple[Rule, ...] = (
    check_sampling_settings,
    check_scheduling_functions,
    check_filter_of_groups,
    check_custom_generate,
    check_rollout_functions,
    check_rollout_time_limit,
    check_fully_async,
    check_single_samples,
    check_hooks,
)
