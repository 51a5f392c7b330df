"""Rules about what is drawn, kept and carried over between rollouts."""

from __future__ import annotations

from arguments.validate import Rule, Settings, problem
from slime_like.config import Problem
from slime_like.custom_function import load_function

BUILT_IN_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters."
PATHS = ("dynamic_sampling_filter_path", "buffer_filter_path", "rollout_sample_filter_path")
SWITCHES = ("over_sampling_batch_size", "partial_rollout", "mask_offpolicy_in_partial_rollout", "rollout_slice_len", *PATHS)


def scheduling_needs_sampling(s: Settings) -> list[Problem]:
    if s.generates:
        return []
    given = {name: getattr(s.scheduling, name) for name in SWITCHES}
    words = "has no effect: this run samples no rollouts; leave it out"
    return [p for name, value in given.items() if value for p in problem(name, None if value is True else value, words)]


def over_sampling(s: Settings) -> list[Problem]:
    size, wanted = s.scheduling.over_sampling_batch_size, s.rollout.rollout_batch_size
    if size is None or size >= wanted:
        return []
    return problem("over_sampling_batch_size", size, f"must be at least --rollout-batch-size {wanted}: so many groups a rollout needs")


def idle_scheduling(s: Settings) -> list[Problem]:
    """Settings that need another one."""
    config, found = s.scheduling, []
    if not config.partial_rollout:
        for name in ("mask_offpolicy_in_partial_rollout", "buffer_filter_path"):
            if getattr(config, name):
                found += problem(name, None, "has no effect without --partial-rollout; add the switch")
    if config.rollout_slice_len is not None and not (
        config.partial_rollout
        or config.dynamic_sampling_filter_path
        or (config.over_sampling_batch_size or 0) > s.rollout.rollout_batch_size
    ):
        words = "has no effect without --partial-rollout, --over-sampling-batch-size above --rollout-batch-size or a dynamic filter; leave it out"
        found += problem("rollout_slice_len", config.rollout_slice_len, words)
    if config.dynamic_sampling_filter_path is None and "max_num_gen_batches" in s.given:
        found += problem(
            "max_num_gen_batches", config.max_num_gen_batches, "has no effect without --dynamic-sampling-filter-path; leave it out"
        )
    return found


def scheduling_functions(s: Settings) -> list[Problem]:
    """They can be imported."""
    if not s.generates:
        return []
    found = []
    for name in PATHS:
        path = getattr(s.scheduling, name)
        if path is None or path in FILTERS:
            continue
        flag = "--" + name.replace("_", "-")
        try:
            load_function(path, flag)
        except ValueError as error:
            found += problem(name, None, str(error).removeprefix(flag + " "))
    return found


FILTERS = tuple(BUILT_IN_FILTERS + name for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"))
SCHEDULING_RULES: tuple[Rule, ...] = (scheduling_needs_sampling, over_sampling, idle_scheduling, scheduling_functions)
