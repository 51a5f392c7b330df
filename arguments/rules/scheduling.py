"""Rules about rollout scheduling: what is sampled, filtered and carried over between rollouts."""

from __future__ import annotations

import dataclasses
import inspect

from arguments.rules.base import Rule, Settings, problem
from arguments.rules.data import teacher_urls
from slime_like.advantages.registry import TokenEstimator, advantage_estimators
from slime_like.config import Problem, flag_name
from slime_like.import_utils import load_function, takes_args

BUILT_IN_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."
PATHS = (
    "dynamic_sampling_filter_path",
    "buffer_filter_path",
    "rollout_sample_filter_path",
    "custom_generate_function_path",
    "rollout_function_path",
    "data_source_path",
)
CUSTOM_GENERATE = "custom_generate_function_path"
ROLLOUT_FUNCTION, EVAL_FUNCTION = "rollout_function_path", "eval_function_path"
OWN_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"  # what a run does without a function
OTHER_ROLLOUTS = {
    "slime.rollout.fully_async_rollout.": "--async-rollout samples ahead of the training",
    "slime.rollout.sft_rollout.": "--loss-type sft_loss needs no function",
    "slime.rollout.forge_load.": "rollouts are read with --load-debug-rollout-data",
}
SWITCHES = (
    "over_sampling_batch_size",
    "partial_rollout",
    "mask_offpolicy_in_partial_rollout",
    "rollout_slice_len",
    "rollout_time_limit_s",
    "async_rollout",
    *PATHS,
)


def scheduling_needs_sampling(s: Settings) -> list[Problem]:
    if s.generates:
        return []
    of_evaluation = (CUSTOM_GENERATE, ROLLOUT_FUNCTION) if s.evaluates else ()
    given = {name: getattr(s.scheduling, name) for name in SWITCHES if name not in of_evaluation}
    words = "has no effect: this run samples no rollouts; leave it out"
    return [
        p
        for name, value in given.items()
        if value
        for p in problem(name, None if value is True else value, words)
    ]


def over_sampling(s: Settings) -> list[Problem]:
    size, wanted = s.scheduling.over_sampling_batch_size, s.rollout.rollout_batch_size
    if size is None or size >= wanted:
        return []
    return problem(
        "over_sampling_batch_size",
        size,
        f"must be at least --rollout-batch-size {wanted}: so many groups a rollout needs",
    )


def idle_scheduling(s: Settings) -> list[Problem]:
    """--rollout-slice-len only has an effect with partial rollouts, over-sampling or a filter."""
    config, found = s.scheduling, []
    if config.rollout_slice_len is not None and not (
        config.partial_rollout
        or config.dynamic_sampling_filter_path
        or (config.over_sampling_batch_size or 0) > s.rollout.rollout_batch_size
    ):
        words = "has no effect without --partial-rollout, --over-sampling-batch-size above --rollout-batch-size or a dynamic filter; leave it out"
        found += problem("rollout_slice_len", config.rollout_slice_len, words)
    return found


def scheduling_functions(s: Settings) -> list[Problem]:
    """User functions of rollout scheduling and evaluation can be imported."""
    found = []
    for name in (*PATHS, EVAL_FUNCTION) if s.generates or s.evaluates else ():
        path = getattr(s.scheduling, name)
        if path is None or path in FILTERS or path.startswith((OWN_ROLLOUT, *OTHER_ROLLOUTS)):
            continue
        flag = flag_name(name)
        try:
            load_function(path, flag)
        except ValueError as error:
            found += problem(name, None, str(error).removeprefix(flag + " "))
    return found


def custom_generate_is_async(s: Settings) -> list[Problem]:
    """A custom generate function must be async, and is incompatible with generating in slices."""
    path = s.scheduling.custom_generate_function_path
    if path is None or not (s.generates or s.evaluates):
        return []
    try:
        function = load_function(path, flag_name(CUSTOM_GENERATE))
    except ValueError:
        return []  # already reported
    found = []
    if not inspect.iscoroutinefunction(function):
        found += problem(CUSTOM_GENERATE, path, "must be an async function")
    if s.scheduling.partial_rollout or s.scheduling.rollout_slice_len is not None:
        name = "partial_rollout" if s.scheduling.partial_rollout else "rollout_slice_len"
        found += problem(
            name,
            None,
            "does not go with --custom-generate-function-path, whose responses are made in one piece; leave one out",
        )
    replayed = {
        "renormalize_sampled_log_probs": (s.rollout.renormalize_sampled_log_probs, "token sets"),
        "use_rollout_routing_replay": (s.rollout.use_rollout_routing_replay, "routes"),
    }
    for name, (given, what) in replayed.items():
        if given and takes_args(function):
            words = f"does not go with --custom-generate-function-path in slime's convention, whose samples tell no {what}; leave one out, or write it as function(model, episode)"
            found += problem(name, None, words)
    return found


def _wrong_functions(s: Settings) -> list[Problem]:
    """Rollout functions that are slime's own or async, which are not supported."""
    config, found = s.scheduling, list[Problem]()
    for name in (ROLLOUT_FUNCTION, EVAL_FUNCTION):
        path = getattr(config, name)
        hint = next(
            (
                words
                for start, words in OTHER_ROLLOUTS.items()
                if path is not None and path.startswith(start)
            ),
            None,
        )
        if path is not None and hint is not None:
            found += problem(name, path, f"is slime's own, and not here: {hint}")
        elif path is not None and path != OWN_ROLLOUT and (s.generates or s.evaluates):
            try:
                function = load_function(path, flag_name(name))
            except ValueError:
                continue  # already reported
            if inspect.iscoroutinefunction(function):
                found += problem(
                    name,
                    path,
                    "must be a plain function, not an async one; await in it with "
                    "slime_like.compat.slime.api.run",
                )
    return found


def rollout_functions(s: Settings) -> list[Problem]:
    """Problems of rollout and evaluation functions, and settings incompatible with them."""
    config, found = s.scheduling, _wrong_functions(s)
    if config.eval_function_path is not None and not s.evaluates:
        found += problem(
            EVAL_FUNCTION,
            config.eval_function_path,
            "has no effect: this run evaluates nothing; add --eval-interval",
        )
    has_function = config.rollout_function_path not in (None, OWN_ROLLOUT)
    if not has_function and config.data_source_path is None:
        if "rollout_function_timeout_s" in s.given and config.eval_function_path in (
            None,
            OWN_ROLLOUT,
        ):
            words = "has no effect without --rollout-function-path or --eval-function-path; leave it out"
            found += problem("rollout_function_timeout_s", config.rollout_function_timeout_s, words)
        return found
    estimator = advantage_estimators.get(s.algorithm.advantage_estimator)
    refused = {
        "rollout_slice_len": (
            config.rollout_slice_len is not None,
            "which asks the engine for whole responses",
        ),
        "renormalize_sampled_log_probs": (
            s.rollout.renormalize_sampled_log_probs,
            "whose samples have no sampling masks",
        ),
        "use_rollout_routing_replay": (
            s.rollout.use_rollout_routing_replay,
            "whose samples have no routed experts",
        ),
        "advantage_estimator": (
            isinstance(estimator, TokenEstimator) and estimator.needs_greedy,
            "which makes no greedy responses",
        ),
    }
    flag = flag_name(ROLLOUT_FUNCTION if has_function else "data_source_path")
    for name, (given, words) in refused.items():
        if given:
            found += problem(name, None, f"does not go with {flag}, {words}; leave one out")
    return found


def time_limit(s: Settings) -> list[Problem]:
    """--rollout-time-limit-s needs an engine with single requests, which can be aborted."""
    limit, config = s.scheduling.rollout_time_limit_s, s.scheduling
    if limit is None:
        return []
    if s.rollout.rollout_engine != "sglang":
        words = "needs --rollout-engine sglang; the local engine's responses are bounded by --rollout-max-response-len alone"
        return problem("rollout_time_limit_s", limit, words)
    if config.rollout_function_path not in (None, OWN_ROLLOUT):
        words = "has no effect on --rollout-function-path, which bounds its responses itself; leave one out"
        return problem("rollout_time_limit_s", limit, words)
    estimator = advantage_estimators.get(s.algorithm.advantage_estimator)
    others = {
        "rollout_slice_len": config.rollout_slice_len is not None,
        "renormalize_sampled_log_probs": s.rollout.renormalize_sampled_log_probs,
        "use_rollout_routing_replay": s.rollout.use_rollout_routing_replay,
        "advantage_estimator": isinstance(estimator, TokenEstimator) and estimator.needs_greedy,
    }
    words = "does not go with --rollout-time-limit-s, whose responses are collected one by one; leave one out"
    return [p for name, given in others.items() if given for p in problem(name, None, words)]


def hook_functions(s: Settings) -> list[Problem]:
    """Training and logging hooks can be imported, and are compatible with the run."""
    found = []
    for field in dataclasses.fields(s.hooks):
        name, value = field.name, getattr(s.hooks, field.name)
        for path in [value] if isinstance(value, str) else value or ():
            flag = flag_name(name)
            try:
                load_function(path, flag)
            except ValueError as error:
                found += problem(name, None, str(error).removeprefix(flag + " "))
    if s.hooks.custom_pg_loss_reducer_function_path is not None and not s.loss.homogeneous:
        name = "custom_pg_loss_reducer_function_path"
        words = f"does not go with the policy loss {s.loss.name}, which is not linear in its advantages; leave it out"
        found += problem(name, None, words)
    name = "custom_convert_samples_to_train_data_path"
    if s.algorithm.kl_coef and s.hooks.custom_convert_samples_to_train_data_path is not None:
        words = f"does not go with {flag_name(name)}: its rewards are trained on as they are; use --use-kl-loss"
        found += problem("kl_coef", s.algorithm.kl_coef, words)
    return found


def reward_post_process(s: Settings) -> list[Problem]:
    path, name = s.algorithm.custom_reward_post_process_path, "custom_reward_post_process_path"
    if path is None:
        return []
    if s.algorithm.loss_type == "sft_loss" or not s.trains:
        return problem(name, path, "has no effect: this run makes no advantages; leave it out")
    found = []
    try:
        load_function(path, flag_name(name))
    except ValueError as error:
        found += problem(name, None, str(error).removeprefix(flag_name(name) + " "))
    if s.algorithm.kl_coef:
        found += problem(
            "kl_coef",
            s.algorithm.kl_coef,
            f"does not go with {flag_name(name)}, which sees the rewards alone; use --use-kl-loss",
        )
    return found


def reward_server(s: Settings) -> list[Problem]:
    url, wanted = s.reward.rm_url, s.reward.rm_type == "remote_rm"
    if url is not None and not url.startswith(("http://", "https://")):
        return problem("rm_url", url, "must start with http:// or https://")
    if url is not None and not wanted and not (s.distillation.served and url in teacher_urls(s)):
        return problem("rm_url", url, "has no effect without --rm-type remote_rm; add it")
    return []


FILTERS = tuple(
    BUILT_IN_FILTERS + name
    for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")
)
SCHEDULING_RULES: tuple[Rule, ...] = (
    scheduling_needs_sampling,
    over_sampling,
    idle_scheduling,
    scheduling_functions,
    custom_generate_is_async,
    rollout_functions,
    time_limit,
    hook_functions,
    reward_post_process,
    reward_server,
)
