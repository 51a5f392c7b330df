"""Hypothesis profiles: `quick` in make test, `long` in make fuzz. Signals as in a terminal."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

_HEALTH = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "quick", max_examples=50, deadline=None, derandomize=True, suppress_health_check=_HEALTH
)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20000")),
    deadline=None,
    print_blob=True,
    suppress_health_check=_HEALTH,
)
settings.load_profile("quick")

# nohup and jobs in the background ignore these, and so would every program that a test starts; a
# handler, unlike SIG_IGN, is not inherited
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collection looks for nothing meanwhile, and not at what was imported afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_attention_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's models leave their --attention-backend in the environment, which the next
    test's command line would contradict."""
    for kernel in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.delenv(f"NVTE_{kernel}_ATTN", raising=False)
