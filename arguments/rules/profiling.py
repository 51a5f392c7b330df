"""Rules about traces and memory snapshots."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem


def check_profile_range(s: Settings) -> list[Problem]:
    """The range of traced rollouts is not empty and starts within the run."""
    profiling = s.profiling
    count = s.rollout.num_rollout
    if not profiling.profile:
        return []
    start = profiling.profile_step_start
    end = profiling.profile_step_end
    if end <= start:
        return problem("profile_step_end", end, f"must be above --profile-step-start {start}")
    if count is not None and start >= count:
        message = f"must be below --num-rollout {count}; legal: 0 to {count - 1}"
        return problem("profile_step_start", start, message)
    return []


def check_profile_ranks(s: Settings) -> list[Problem]:
    for rank in s.profiling.profile_ranks:
        if not 0 <= rank < s.world_size:
            return problem("profile_ranks", rank, f"legal ranks: 0 to {s.world_size - 1}")
    return []


def check_memory_history(s: Settings) -> list[Problem]:
    if not s.profiling.record_memory_history or s.machine.cuda:
        return []
    message = "requires a CUDA device; remove it, or see the metric perf/peak_rss_gb"
    return problem("record_memory_history", None, message)


PROFILING_RULES: tuple[Rule, ...] = (check_profile_range, check_profile_ranks, check_memory_history)
