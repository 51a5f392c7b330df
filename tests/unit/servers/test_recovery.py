"""Servers that are lost at an awkward moment, that hang, or that cannot be given the weights at
once: what is tried again, and who gets no requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from slime_like.engines import served
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import SglangProgram
from slime_like.servers.launches import Slot
from slime_like.servers.processes import EngineProcess
from slime_like.servers.router import Router
from slime_like.servers.server_pool import MAX_RESTARTS, Worker
from tests.fake_sglang import Handler, engine_of, fake_servers, make_served_model, weights_of

SAMPLING = SamplingParams(max_new_tokens=8)
REQUESTS = [GenerateRequest(10, (3, 5, 7), seed=100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Process(EngineProcess):
    """The run's own process, of a server that goes on behind it."""

    sender = 0

    def __init__(self, status: int | None = None) -> None:
        self.status = status
        self.ended = 0
        self.restarted = 0

    @property
    def exit_status(self) -> int | None:
        return self.status

    def log_tail(self, characters: int = 600) -> str:
        return ""

    def end(self) -> None:
        self.ended += 1
        self.status = -9

    def restart(self) -> Process:
        self.restarted += 1
        self.status = None
        return self


def pool_of(engine: SglangEngine) -> Any:
    assert engine.pool is not None
    return engine.pool


@pytest.mark.parametrize("routed", [False, True])
def test_a_server_lost_at_the_end_of_an_update_gets_no_requests(
    model: str, routed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has reported the version. The run goes on with the other one, and does not wait for
    a router that would take a dead server never."""
    check_versions = served.check_versions

    def and_then_lost(pool: Any, workers: list[Worker], version: int) -> list[Worker]:
        responding = check_versions(pool, workers, version)
        if version == 2:
            servers[0].hung = True
            pool.evict(pool.workers[0], "its process ended with status -9")
        return responding

    with fake_servers(model, 3) as (*servers, fake):
        router = Router(fake.url, None, 1.0) if routed else None
        with engine_of(model, servers, router=router) as engine:
            monkeypatch.setattr(served, "check_versions", and_then_lost)
            engine.update_weights(weights_of(model), 2)
            assert engine.weight_version == 2
            assert pool_of(engine).workers[0].version is None, "it would be ready once it answers"
            assert [w.url for w in pool_of(engine).ready()] == [servers[1].url]
            assert fake.workers == ([servers[1].url] if routed else [])
            servers[0].hung = False


def test_a_server_that_the_router_does_not_take_is_out(model: str) -> None:
    """The other one is served on."""

    class Choosy(Router):
        def add(self, worker: str) -> None:
            if worker == servers[0].url:
                fake.refused["/workers"] = (503, "it does not answer")
            try:
                super().add(worker)
            finally:
                fake.refused.clear()

    with fake_servers(model, 3) as (*servers, fake):
        router = Choosy(fake.url, None, 1.0)
        with engine_of(model, servers, router=router, synced=False, probe_timeout_s=0.5) as engine:
            engine.update_weights(weights_of(model), 1)
            assert engine.weight_version == 1 and pool_of(engine).evictions == 1
            assert servers[1].url in [w.url for w in pool_of(engine).ready()]


def test_the_router_is_called_without_the_lock(model: str) -> None:
    """Its answer may take a minute, in which requests and health checks need the lock."""
    free = []

    class Slow(Router):
        def remove(self, worker: str) -> None:
            def try_lock() -> None:
                free.append(pool.lock.acquire(timeout=0.5))
                if free[-1]:
                    pool.lock.release()

            other = threading.Thread(target=try_lock)
            other.start()
            other.join()
            super().remove(worker)

    with fake_servers(model, 2) as (server, fake):
        router = Slow(fake.url, None, 1.0)
        with engine_of(model, [server], router=router) as engine:
            pool = pool_of(engine)
            (worker,) = pool.workers
            evictions = worker.evictions
            for _ in range(2):  # of two requests that were sent before
                pool.report_wrong_version(worker, evictions, "weight version 7")
            assert free == [True]
            assert (worker.evictions, worker.num_wrong_versions) == (1, 1)


def test_a_hanging_server_that_was_evicted_is_restarted(model: str) -> None:
    """Also if a control call has found it and not a probe; and again if it never answers."""
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        pool = pool_of(engine)
        process = Process()
        pool.workers[0].process = process
        pool.health = type(pool.health)(0.05, 0.2, start_s=1.0, failed_probes=2)
        server.hung = True
        pool.evict(pool.workers[0], "loading weights from disk: no whole answer within 300 s")
        wait_until(lambda: process.restarted == 1)
        started = time.monotonic()
        wait_until(lambda: process.restarted == 2)
        assert time.monotonic() - started > 0.7, "it is given its time to start"
        server.hung = False
        wait_until(lambda: bool(pool.ready()))
        assert process.ended == process.restarted == pool.workers[0].restarts


def test_weights_that_did_not_reach_a_returning_server_are_sent_again(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        pool = pool_of(engine)
        (worker,) = pool.workers
        before = server.count("/update_weights_from_disk")
        server.refused["/update_weights_from_disk"] = (500, "busy")
        pool.evict(worker, "of the test")
        wait_until(lambda: server.count("/update_weights_from_disk") >= before + 2)
        assert pool.alive() and not pool.ready() and pool.may_recover()
        server.refused.clear()
        (output,) = engine.generate(REQUESTS, SAMPLING)
        assert output.failure is None and output.weight_versions == (1,) * len(output.tokens)


def test_a_server_is_asked_to_generate_only_where_it_can(model: str) -> None:
    """While it is paused for an update, or has released its memory, a probe of SGLang's that
    generates a token would fail, and a healthy server be lost. At other times it finds a server
    whose scheduler hangs."""
    paused = threading.Event()
    with (
        fake_servers(model, 1) as (server,),
        engine_of(
            model, [server], probe_timeout_s=0.5, update_timeout_s=30, colocated=True
        ) as engine,
    ):
        pool = pool_of(engine)
        get, answer = server.get, server.answer

        def get_or_wait(handler: Handler) -> None:
            if paused.is_set() and handler.path.startswith("/health"):
                time.sleep(2.0)
            get(handler)

        def answer_slowly(handler: Handler, body: Any) -> None:
            if handler.path in ("/pause_generation", "/release_memory_occupation"):
                paused.set()
            if handler.path == "/update_weights_from_disk":
                time.sleep(3.0)
            if handler.path == "/continue_generation":
                paused.clear()
            answer(handler, body)

        server.get, server.answer = get_or_wait, answer_slowly  # type: ignore[method-assign]
        engine.release_memory()
        time.sleep(2.0)
        engine.update_weights(weights_of(model), 2)
        assert engine.weight_version == 2 and pool.evictions == 0
        engine.pause()
        time.sleep(2.0)
        engine.resume()
        assert pool.evictions == 0
        server.refused["/health_generate"] = (503, "the scheduler hangs")
        wait_until(lambda: pool.evictions == 1)
        assert not pool.alive(), "it returns when it generates"
        server.refused.clear()
        wait_until(lambda: bool(pool.ready()))
        assert pool.evictions == 1


def test_health_of_servers_of_the_run_generates_nothing() -> None:
    """The router asks for it, also during updates."""
    environment = SglangProgram("python", "model", "bfloat16", cuda=True).environment(
        Slot("127.0.0.1", 1, 1, 0)
    )
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


@pytest.mark.parametrize(("status", "waits"), [(1, False), (None, True)])
def test_a_dead_server_without_restarts_is_not_waited_for(
    model: str, status: int | None, waits: bool
) -> None:
    """Only if the last restart is under way."""
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        pool = pool_of(engine)
        (worker,) = pool.workers
        worker.restarts = MAX_RESTARTS
        worker.process = Process(status)
        assert pool.can_restart_any() == pool.may_recover() == waits
