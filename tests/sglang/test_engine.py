"""The engine and real servers behind a router: weights replaced while they generate, when every
token has the version that it was sampled under and the log-prob of those weights; requests that are
aborted; memory released and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.servers.requests import RequestSettings
from slime_like.servers.router import Router
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.updater import WeightUpdater
from tests.real_servers import (
    assert_versions_tell_the_weights,
    in_background,
    network,
    wait_until,
    weights,
)
from tests.sglang.conftest import Servers, running, slowed

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SAMPLING = SamplingParams(max_new_tokens=160)
LONG = SamplingParams(
    max_new_tokens=400, ignore_end_tokens=True
)  # with a pause of 0.05 s a token: 20 s
REQUESTS = [GenerateRequest(i, (7, 20 + i, 30, 40, 8), seed=i) for i in range(12)]


@contextlib.contextmanager
def engine_of(
    model: str, urls: Sequence[str], transport: str, *, router: str | None = None, **more: Any
) -> Iterator[SglangEngine]:
    """
    Args:
        router: host:port.
        more: Of the engine; `adapter` of its updates.
    """
    behind = None if router is None else Router(f"http://{router}", None, 5.0)
    with engine_with(
        ServerPool(urls, [], behind, HealthSettings(interval_s=0.3), 5.0, api=SglangApi()),
        model,
        transport,
        **more,
    ) as engine:
        yield engine


@contextlib.contextmanager
def engine_with(
    pool: ServerPool, model: str, transport: str, **more: Any
) -> Iterator[SglangEngine]:
    try:
        pool.start()
        updater = WeightUpdater(
            pool,
            UpdateSettings(transport, timeout_s=60, adapter=more.pop("adapter", None)),
            model,
            torch.device("cpu"),
        )
        engine = SglangEngine(
            pool, updater, RequestSettings(), model, **({"check_updates": True} | more)
        )
    except BaseException:
        pool.close()
        raise
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor"])
def test_versions_and_log_probs_of_tokens_around_an_update(
    demo: Path, servers: Servers, transport: str
) -> None:
    """Through the router, while both servers are in the middle of responses."""
    model = str(demo / "model")
    with (
        engine_of(model, servers.urls, transport, router=servers.router) as engine,
        slowed(servers, 0.02),
    ):
        engine.update_weights(weights(model, 1.0), 1)
        with in_background(engine, REQUESTS, SAMPLING) as outputs:
            wait_until(
                lambda: all(running(url) for url in servers.urls), "requests at both servers"
            )
            time.sleep(0.3)
            assert not any(worker.in_flight for worker in engine.pool.workers), (
                "requests went past the router"
            )
            engine.pause()
            engine.update_weights(weights(model, 1.1), 2)
            engine.resume()
        assert len(outputs) == len(REQUESTS) and all(o.failure is None for o in outputs), [
            o.failure for o in outputs
        ]
        assert any(set(o.weight_versions) == {1, 2} for o in outputs), (
            "the update came too early or too late"
        )
        assert_versions_tell_the_weights(
            REQUESTS, outputs, {1: network(model, 1.0), 2: network(model, 1.1)}
        )


@pytest.mark.parametrize("routed", [True, False], ids=["router", "direct"])
def test_an_abort_ends_requests_at_the_servers(demo: Path, servers: Servers, routed: bool) -> None:
    """Of twelve long ones, all but two: what they have comes back, and the servers work on no
    others than these two."""
    model = str(demo / "model")
    kept = {REQUESTS[0].sample_id, REQUESTS[5].sample_id}

    async def generate(engine: SglangEngine) -> tuple[list[GenerateOutput], int, float]:
        tasks = {r.sample_id: asyncio.ensure_future(engine.generate_one(r, LONG)) for r in REQUESTS}
        while sum(running(url) for url in servers.urls) < len(REQUESTS):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await engine.abort(tasks.keys() - kept)
        aborted = [tasks[sample_id] for sample_id in tasks if sample_id not in kept]
        await asyncio.wait_for(asyncio.gather(*aborted), 10)
        seconds = time.monotonic() - start
        while (left := sum(running(url) for url in servers.urls)) > len(
            kept
        ) and time.monotonic() < start + 5:  # reported once a step
            await asyncio.sleep(0.05)
        await engine.abort()
        outputs = list(await asyncio.wait_for(asyncio.gather(*tasks.values()), 10))
        await engine.leave_loop()
        return outputs, left, seconds

    with (
        engine_of(
            model, servers.urls, "tensor", router=servers.router if routed else None
        ) as engine,
        slowed(servers, 0.05),
    ):
        engine.update_weights(weights(model, 1.0), 1)
        outputs, left, seconds = asyncio.run(asyncio.wait_for(generate(engine), 120))
        assert left == len(kept) and seconds < 10
        wait_until(lambda: not any(running(url) for url in servers.urls), "no request left", 10)
    assert all(
        o.finish_reason == "abort" and o.failure is None and 0 < len(o.tokens) < 400
        for o in outputs
    ), outputs
    assert_versions_tell_the_weights(REQUESTS, outputs, {1: network(model, 1.0)})


def test_memory_is_released_and_taken_back(demo: Path, servers: Servers) -> None:
    """As around training on shared GPUs. A server without one takes the calls, and would end over
    one that is out of order."""
    model = str(demo / "model")
    with engine_of(model, servers.urls, "tensor", colocated=True) as engine:
        assert engine.pool is not None
        engine.update_weights(weights(model, 1.0), 1)
        before = engine.generate(REQUESTS[:2], GREEDY)
        for version in (2, 3):
            engine.release_memory()
            assert engine.weight_version == -1
            engine.update_weights(weights(model, 1.0), version)
            after = engine.generate(REQUESTS[:2], GREEDY)
            assert [o.tokens for o in after] == [o.tokens for o in before] and set(
                after[0].weight_versions
            ) == {version}
        assert engine.pool.evictions == 0
