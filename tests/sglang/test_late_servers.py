"""Real servers that come back, that are started again, or that are added to a router while a run
continues: they get the run's current weights over their own broadcast before any request, and
the others do not wait for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from slime_like.engines.base import GenerateOutput
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.servers.processes import ServerProcess, free_ports
from slime_like.servers.router import Router
from slime_like.servers.server_api import Legal
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.sglang.protocol import generation_body, read_generation
from tests.real_servers import (
    assert_versions_tell_the_weights,
    in_background,
    network,
    wait_until,
    weights,
)
from tests.sglang.conftest import (
    START_S,
    Servers,
    give_own_weights,
    running,
    schedulers_below,
    server_launch,
    slowed,
)
from tests.sglang.test_engine import GREEDY, REQUESTS, SAMPLING, engine_of, engine_with

FACTORS = {1: 1.0, 2: 1.1, 3: 1.2}  # of the weights of each version


def ask(url: str) -> GenerateOutput:
    """What this server answers."""
    body = generation_body(REQUESTS[0], GREEDY, "ask")
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().content
    return read_generation(answer, REQUESTS[0], GREEDY, "ask", Legal(2**31, FACTORS))


def assert_has(url: str, model: str, version: int) -> None:
    """By its name of its weights, and by its log-probs, which are far from those of the version
    before."""
    assert httpx.get(f"{url}/model_info", timeout=30).json()["weight_version"] == str(version)
    output = ask(url)
    assert set(output.weight_versions) == {version}
    assert_versions_tell_the_weights(
        REQUESTS[:1], [output], {version: network(model, FACTORS[version])}
    )
    with pytest.raises(AssertionError):
        assert_versions_tell_the_weights(
            REQUESTS[:1], [output], {version: network(model, FACTORS[version - 1])}
        )


def is_ready(engine: SglangEngine, url: str) -> bool:
    return any(worker.url == url for worker in engine.pool.ready())


def test_one_that_comes_back(demo: Path, servers: Servers) -> None:
    """It was lost in the middle of an update: paused, inside a session, with other weights. The
    other one is busy all the while."""
    model, lost = str(demo / "model"), servers.urls[1]
    with (
        engine_of(model, servers.urls, "broadcast", router=servers.router) as engine,
        slowed(servers, 0.03),
    ):
        for version in (1, 2):
            engine.update_weights(weights(model, FACTORS[version]), version)
        with in_background(engine, REQUESTS, SAMPLING) as outputs:
            wait_until(
                lambda: all(running(url) for url in servers.urls), "requests at both servers"
            )
            engine.pool.evict(engine.pool.workers[1], "the test takes it out")
            httpx.post(
                f"{lost}/pause_generation", json={"mode": "abort"}, timeout=60
            ).raise_for_status()
            httpx.post(f"{lost}/begin_weight_update", json={}, timeout=60)
            assert not is_ready(engine, lost)
            wait_until(lambda: is_ready(engine, lost), "its return")
            assert running(servers.urls[0]), "the other one had nothing to do meanwhile"
            assert_has(lost, model, 2)
        assert all(set(o.weight_versions) == {2} and o.failure is None for o in outputs), [
            o.failure for o in outputs
        ]
        assert_versions_tell_the_weights(REQUESTS, outputs, {2: network(model, FACTORS[2])})
        engine.update_weights(weights(model, FACTORS[3]), 3)  # over a new group of both
        for url in servers.urls:
            assert_has(url, model, 3)


def test_one_that_is_added_to_the_router(demo: Path, servers: Servers) -> None:
    model, first, late = str(demo / "model"), *servers.urls
    give_own_weights(servers, demo / "model")
    router = Router(f"http://{servers.router}", None, 5.0)
    router.remove(late)
    router.add(first)
    pool = ServerPool(
        [first],
        [],
        router,
        HealthSettings(interval_s=0.3),
        5.0,
        api=SglangApi(),
        joined_by_router=True,
    )
    with engine_with(pool, model, "broadcast") as engine:
        for version in (1, 2):
            engine.update_weights(weights(model, FACTORS[version]), version)
        httpx.post(
            f"http://{servers.router}/workers", json={"url": late}, timeout=30
        ).raise_for_status()
        wait_until(lambda: is_ready(engine, late), "that it takes part")
        wait_until(
            lambda: set(router.workers()) == set(servers.urls), "that the router sends it requests"
        )
        assert_has(late, model, 2)
        engine.update_weights(weights(model, FACTORS[3]), 3)
        for url in servers.urls:
            assert_has(url, model, 3)


def test_one_that_is_none_of_the_runs_gets_nothing(demo: Path, servers: Servers) -> None:
    """The run names its servers; the router has another one, with other weights."""
    model, first, other = str(demo / "model"), *servers.urls
    router = Router(f"http://{servers.router}", None, 5.0)
    router.add(other)
    with engine_of(model, [first], "broadcast", router=servers.router) as engine:
        assert other not in router.workers()
        engine.update_weights(weights(model, FACTORS[1]), 1)
        assert [w.url for w in engine.pool.workers] == [first] and set(router.workers()) == {first}


def test_the_only_one_is_killed_and_started_again(demo: Path, tmp_path: Path) -> None:
    """In the middle of responses: they wait for it, and are made with the current weights, not with
    those that it starts with."""
    model = str(demo / "model")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    started = ServerProcess(server_launch(demo / "model", port, tmp_path / "server.log"))
    pool = ServerPool(
        [],
        [(url, started)],
        None,
        HealthSettings(interval_s=0.5, start_s=START_S),
        5.0,
        api=SglangApi(),
    )
    with engine_with(pool, model, "broadcast") as engine:
        for version in (1, 2):
            engine.update_weights(weights(model, FACTORS[version]), version)
        with in_background(engine, REQUESTS, SAMPLING) as outputs:
            wait_until(lambda: running(url) > 0, "requests at the server")
            os.kill(schedulers_below(started.pid)[0], signal.SIGKILL)
            wait_until(
                lambda: is_ready(engine, url) and pool.workers[0].restarts == 1,
                "its return",
                START_S,
            )
            assert_has(url, model, 2)
        assert len(outputs) == len(REQUESTS) and all(o.failure is None for o in outputs), [
            o.failure for o in outputs
        ]
        assert_versions_tell_the_weights(REQUESTS, outputs, {2: network(model, FACTORS[2])})
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=5)
