"""Metrics of updates and their checks reach the log once, and an update is made again if servers
were lost in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.engines.base import RolloutEngine
from slime_like.errors import RunError
from slime_like.megatron.backend import MegatronBackend
from slime_like.metrics.progress import Progress
from slime_like.weight_sync.sync import ATTEMPTS, WeightSync


class Engine(RolloutEngine):
    """Takes every update but the first `failures`."""

    def __init__(self, failures: int) -> None:
        self.failures = failures


class Backend:
    def sync_weights(self, engine: Engine, version: int) -> dict[str, float]:
        if engine.failures:
            engine.failures -= 1
            return {}
        engine.weight_version = version
        return {"lora/merged_update_error": version / 10}


class Check:
    def __init__(self, lost: int = 0) -> None:
        self.lost = lost  # checks that no server answers

    def run(self, version: int) -> dict[str, float]:
        if self.lost:
            self.lost -= 1
            return {}
        return {"engine/weight_check_log_prob_diff": version / 100}


def sync_of(engine: Engine, *, always: bool, lost: int = 0) -> WeightSync:
    backend: Any = Backend()
    check: Any = Check(lost)
    return WeightSync(backend, engine, Progress(10, show=False), check=check, check_always=always)


def test_metrics_are_taken_once() -> None:
    sync = sync_of(Engine(failures=2), always=False)
    sync.sync(1)
    assert sync.take_metrics() == {
        "lora/merged_update_error": 0.1,
        "engine/weight_check_log_prob_diff": 0.01,
    }
    assert sync.take_metrics() == {}
    sync.sync(1)
    assert sync.take_metrics() == {}, "the engine has this version"
    sync.sync(2)
    assert sync.take_metrics() == {"lora/merged_update_error": 0.2}, "checked once"


def test_every_update_may_be_checked() -> None:
    sync = sync_of(Engine(failures=0), always=True)
    for version in (1, 2):
        sync.sync(version)
        assert sync.take_metrics()["engine/weight_check_log_prob_diff"] == version / 100


def test_a_check_that_no_server_answered_is_made_again() -> None:
    sync = sync_of(Engine(failures=0), always=False, lost=1)
    checked = []
    for version in (1, 2, 3):
        sync.sync(version)
        checked.append("engine/weight_check_log_prob_diff" in sync.take_metrics())
    assert checked == [False, True, False]


def test_an_update_that_never_arrives_ends_the_run() -> None:
    with pytest.raises(RunError, match=f"did not reach the engines in {ATTEMPTS} attempts"):
        sync_of(Engine(failures=9), always=False).sync(1)


@pytest.mark.parametrize("quantized", [{}, {"model.weight": "fp8"}])
def test_rounding_is_measured_where_the_engine_has_what_is_measured(
    quantized: dict[str, str],
) -> None:
    measured = {"lora/merged_update_error": 0.5}
    backend: Any = SimpleNamespace(
        export_weights=lambda quantized: iter(()),
        gpt=SimpleNamespace(mtp_num_layers=None),
        _merge_rounding=SimpleNamespace(measure=lambda: measured),
        _quantized_weights=quantized,
    )
    engine: Any = SimpleNamespace(
        takes_adapter=False,
        takes_quantized=True,
        weight_version=1,
        update_weights=lambda weights, version: None,
    )
    expected = {} if quantized else measured
    assert MegatronBackend.sync_weights(backend, engine, 1) == expected
