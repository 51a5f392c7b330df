"""The engine and real vLLM servers: weights replaced while they generate, when every token has the
version that it was sampled under and the log-prob of those weights; requests that are aborted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.vllm.engine import VllmEngine
from slime_like.errors import RunError
from slime_like.servers.requests import RequestSettings
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.vllm.api import VllmApi
from slime_like.vllm.server_check import Needs, check_server
from slime_like.weight_sync.settings import UpdateSettings
from slime_like.weight_sync.updater import WeightUpdater
from tests.real_servers import (
    assert_versions_tell_the_weights,
    in_background,
    network,
    wait_until,
    weights,
)

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SAMPLING = SamplingParams(max_new_tokens=24)
LONG = SamplingParams(max_new_tokens=480, ignore_end_tokens=True)
REQUESTS = [GenerateRequest(i, (7, 20 + i, 30, 40, 8), seed=i) for i in range(8)]


@contextlib.contextmanager
def engine_of(model: str, addresses: Sequence[str], transport: str) -> Iterator[VllmEngine]:
    urls = [f"http://{address}" for address in addresses]
    pool = ServerPool(urls, [], None, HealthSettings(interval_s=1), 5.0, api=VllmApi())
    try:
        pool.start()
        settings = UpdateSettings(transport, buffer_bytes=40_000, timeout_s=120)
        updater = WeightUpdater(pool, settings, model, torch.device("cpu"))
        engine = VllmEngine(pool, updater, RequestSettings(), model, check_updates=True)
    except BaseException:
        pool.close()
        raise
    try:
        yield engine
    finally:
        engine.close()


def assert_parity(model: str, addresses: Sequence[str], transport: str) -> None:
    """Greedy and sampled, with a temperature, after each of three updates; the last weights are the
    first again, and so are the tokens."""
    with engine_of(model, addresses, transport) as engine:
        tokens = []
        for version, factor in ((1, 1.0), (2, 1.2), (3, 1.0)):
            engine.update_weights(weights(model, factor), version)
            assert engine.weight_version == version
            networks = {version: network(model, factor)}
            outputs = engine.generate(REQUESTS, SAMPLING)
            assert {o.failure for o in outputs} == {None}
            assert_versions_tell_the_weights(REQUESTS, outputs, networks)
            greedy = engine.generate(REQUESTS[:2], GREEDY)
            assert_versions_tell_the_weights(REQUESTS[:2], greedy, networks)
            tokens.append([o.tokens for o in outputs])
        assert tokens[0] == tokens[2] != tokens[1], "seeds decide, and weights"


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor"])
def test_parity_after_each_update(wide_demo: Path, servers: list[str], transport: str) -> None:
    assert_parity(str(wide_demo / "model"), servers, transport)


@pytest.mark.parametrize("transport", ["broadcast", "tensor"])
def test_parity_of_experts_after_each_update(
    expert_demo: Path, expert_server: list[str], transport: str
) -> None:
    assert_parity(str(expert_demo / "model"), expert_server, transport)


def test_an_update_in_the_middle_of_responses(wide_demo: Path, servers: list[str]) -> None:
    model = str(wide_demo / "model")
    with engine_of(model, servers, "broadcast") as engine:
        engine.update_weights(weights(model, 1.0), 1)
        with in_background(engine, REQUESTS, LONG) as outputs:
            assert engine.pool is not None
            pool = engine.pool
            wait_until(lambda: all(w.in_flight for w in pool.workers), "requests at both servers")
            time.sleep(0.3)
            engine.pause()
            engine.update_weights(weights(model, 1.1), 2)
            engine.resume()
        assert [o.failure for o in outputs] == [None] * len(REQUESTS)
        assert any(set(o.weight_versions) == {1, 2} for o in outputs), "too early or too late"
        networks = {1: network(model, 1.0), 2: network(model, 1.1)}
        assert_versions_tell_the_weights(REQUESTS, outputs, networks)


def test_an_abort_ends_requests_at_the_servers(wide_demo: Path, servers: list[str]) -> None:
    model = str(wide_demo / "model")
    kept = REQUESTS[0].sample_id

    async def generate(engine: VllmEngine) -> list[GenerateOutput]:
        tasks = {r.sample_id: asyncio.ensure_future(engine.generate_one(r, LONG)) for r in REQUESTS}
        await asyncio.sleep(1.0)
        await engine.abort(tasks.keys() - {kept})
        outputs = list(await asyncio.wait_for(asyncio.gather(*tasks.values()), 120))
        await engine.leave_loop()
        return outputs

    with engine_of(model, servers, "tensor") as engine:
        engine.update_weights(weights(model, 1.0), 1)
        outputs = asyncio.run(generate(engine))
    assert outputs[0].finish_reason == "length" and len(outputs[0].tokens) == 480
    aborted = [o for o in outputs if o.finish_reason == "abort"]
    assert aborted, "all of them ended before"
    assert all(o.failure is None and 0 < len(o.tokens) < 480 for o in aborted)
    assert_versions_tell_the_weights(REQUESTS, outputs, {1: network(model, 1.0)})


def test_stop_tokens_and_strings(wide_demo: Path, servers: list[str]) -> None:
    """They are part of the response."""
    model = str(wide_demo / "model")
    with engine_of(model, servers, "tensor") as engine:
        engine.update_weights(weights(model, 1.0), 1)
        (free,) = engine.generate(REQUESTS[:1], SAMPLING)
        token = free.tokens[3]
        stop = SamplingParams(max_new_tokens=24, stop_token_ids=(token,))
        (stopped,) = engine.generate(REQUESTS[:1], stop)
    end = free.tokens.index(token) + 1
    assert stopped.finish_reason == "stop" and stopped.tokens == free.tokens[:end]


def test_settings_of_a_real_server(wide_demo: Path, servers: list[str]) -> None:
    with engine_of(str(wide_demo / "model"), servers, "tensor") as engine:
        assert engine.pool is not None
        (worker, *_) = engine.pool.alive()
        check_server(engine.pool, worker, Needs("float32", 512))
        with pytest.raises(RunError, match="--dtype is float32, must be bfloat16"):
            check_server(engine.pool, worker, Needs("bfloat16", 512))
        with pytest.raises(RunError, match="--max-model-len is 512, must be at least 600"):
            check_server(engine.pool, worker, Needs("float32", 600))
