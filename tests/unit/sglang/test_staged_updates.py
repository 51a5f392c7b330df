"""Servers sample on while the weights of the next version are written; they pause to load them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slime_like.engines.base import GenerateOutput
from tests.fake_sglang import (
    REQUESTS,
    SAMPLING,
    engine_of,
    fake_servers,
    make_served_model,
    weights_of,
)


@pytest.mark.parametrize("delta", [None, {"full_interval": 8}])
def test_servers_sample_while_the_next_weights_are_written(
    delta: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    model = make_served_model(tmp_path / "model", seed=0)
    during: list[GenerateOutput] = []
    with fake_servers(model, 1) as (server,), engine_of(model, [server], delta=delta) as engine:
        pauses = server.count("/pause_generation")

        def weights() -> Iterator[tuple[str, Tensor]]:
            for number, (name, tensor) in enumerate(weights_of(model)):
                if number == 3:
                    during.extend(engine.generate(REQUESTS, SAMPLING))
                    assert server.count("/pause_generation") == pauses
                yield name, tensor * 1.5

        engine.update_weights(weights(), 2)
        assert len(during) == 3 and not any(output.failure for output in during)
        assert {v for output in during for v in output.weight_versions} == {1}
        assert server.count("/pause_generation") == pauses + 1
        after = engine.generate(REQUESTS, SAMPLING)
        assert {v for output in after for v in output.weight_versions} == {2}
        metrics = engine.take_metrics()
        assert metrics["engine/weight_update_pause_s"] > 0


@pytest.mark.parametrize("delta", [None, {"full_interval": 8}])
def test_servers_return_while_the_next_weights_are_written(
    delta: Mapping[str, Any] | None, tmp_path: Path
) -> None:
    """One after the other: the check of their health does not wait for the files. With a folder
    for each version they get the one before, and requests."""
    model = make_served_model(tmp_path / "model", seed=0)
    with fake_servers(model, 2) as servers, engine_of(model, servers, delta=delta) as engine:
        pool = engine.pool
        assert pool is not None

        def weights() -> Iterator[tuple[str, Tensor]]:
            for number, (name, tensor) in enumerate(weights_of(model)):
                if number == 3:
                    for worker in pool.workers:
                        pool.evict(worker, "test")
                        deadline = time.monotonic() + 10
                        while not worker.alive or (delta is None and worker.version != 1):
                            assert time.monotonic() < deadline, "it does not return"
                            time.sleep(0.01)
                yield name, tensor * 1.5

        engine.update_weights(weights(), 2)
        assert [worker.version for worker in pool.workers] == [2, 2]
        assert [server.version for server in servers] == ["2", "2"]


@pytest.mark.parametrize("transport", ["broadcast", "tensor"])
def test_servers_sample_until_the_first_bucket_is_made(transport: str, tmp_path: Path) -> None:
    """They write a bucket into the weights that they compute with, so they pause for the others."""
    model = make_served_model(tmp_path / "model", seed=0)
    during: list[GenerateOutput] = []
    pauses: list[int] = []
    with (
        fake_servers(model, 1) as (server,),
        engine_of(model, [server], transport=transport, buffer_bytes=2**12) as engine,
    ):
        before = server.count("/pause_generation")

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights_of(model):
                pauses.append(server.count("/pause_generation") - before)
                if not during:
                    during.extend(engine.generate(REQUESTS, SAMPLING))
                yield name, tensor * 1.5

        engine.update_weights(weights(), 2)
        assert {v for output in during for v in output.weight_versions} == {1}
        assert pauses[0] == 0 and pauses[-1] == 1
        after = engine.generate(REQUESTS, SAMPLING)
        assert {v for output in after for v in output.weight_versions} == {2}
