"""Rules about traces and memory snapshots."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem


def rollouts_to_trace(s: Settings) -> list[Problem]:
    """The range of traced rollouts is not empty and starts within the run."""
    profiling, count = s.profiling, s.rollout.num_rollout
    if not profiling.profile:
        return []
    start, end = profiling.profile_step_start, profiling.profile_step_end
    if end <= start:
        return problem(
            "profile_step_end",
            end,
            f"must be above --profile-step-start {start}: nothing would be traced",
        )
    if count is not None and start >= count:
        return problem(
            "profile_step_start",
            start,
            f"the run has {count} rollouts, so nothing would be traced; legal: 0 to {count - 1}",
        )
    return []


def ranks_to_trace(s: Settings) -> list[Problem]:
    wrong = [rank for rank in s.profiling.profile_ranks if not 0 <= rank < s.world_size]
    if wrong:
        return problem("profile_ranks", wrong[0], f"legal ranks: 0 to {s.world_size - 1}")
    return []


def memory_of_a_gpu(s: Settings) -> list[Problem]:
    if s.profiling.record_memory_history and not s.machine.cuda:
        return problem(
            "record_memory_history",
            None,
            "needs a CUDA device: torch records the memory of GPUs alone; leave it out, or see perf/peak_rss_gb",
        )
    return []


PROFILING_RULES: tuple[Rule, ...] = (rollouts_to_trace, ranks_to_trace, memory_of_a_gpu)
