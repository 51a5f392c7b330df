"""Many sessions at once over HTTP, in front of the local engine."""

from __future__ import annotations

import pytest

from benchmarks.bench_agents import Result, measure


def check(found: Result) -> None:
    """`measure` itself asserts that the broken sessions are lost, and no other."""
    assert found.lost == found.broken > 0
    assert found.tokens > found.sessions
    assert found.memory_mib < 1 * found.sessions, "a session and its client take less than a MiB"


@pytest.mark.extended
def test_broken_sessions_cost_their_own_samples() -> None:
    check(measure(100, turns=2, tokens=8, every=30, timeout_s=30))


@pytest.mark.slow
def test_a_thousand_sessions_at_once() -> None:
    check(measure(1000, turns=2, tokens=8, every=100, timeout_s=120))
