"""Hypothesis profiles: `quick` in make test, `long` in make fuzz."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_HEALTH = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "quick", max_examples=50, deadline=None, derandomize=True, suppress_health_check=_HEALTH
)
settings.register_profile(
    "long", max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=_HEALTH
)
settings.load_profile("quick")
