"""Rules about traces and memory snapshots."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from slime_like.config import Problem


def check_profile_ranks(s: Settings) -> list[Problem]:
    ranks = s.profiling.profile_ranks
    if all(0 <= rank < s.world_size for rank in ranks):
        return []
    return problem("profile_ranks", ranks, f"legal ranks: 0 to {s.world_size - 1}")


PROFILING_RULES: tuple[Rule, ...] = (check_profile_ranks,)
