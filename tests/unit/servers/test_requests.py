"""Aborts that come at an awkward moment, and where and how often requests are tried again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from slime_like.engines.base import GenerateOutput
from slime_like.engines.sglang.engine import SglangEngine
from tests.fake_sglang import (
    REQUESTS,
    SAMPLING,
    Answer,
    FakeServer,
    Handler,
    changed,
    engine_of,
    fake_servers,
    make_served_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


def requests_of(engine: SglangEngine) -> Any:
    assert engine._requests is not None
    return engine._requests


def test_a_request_that_waits_is_aborted(model: str) -> None:
    """For an update, or for a server to return: it is not sent afterwards."""
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:

        async def scenario() -> GenerateOutput:
            requests_of(engine).updating = True
            task = asyncio.create_task(engine.generate_one(REQUESTS[0], SAMPLING))
            await asyncio.sleep(0.2)
            await engine.abort([10])
            async with asyncio.timeout(30):
                output = await task
            await engine.leave_loop()
            return output

        output = asyncio.run(scenario())
        assert (output.tokens, output.finish_reason, output.failure) == ((), "abort", None)
        assert server.count("/generate") == 0


def ignores_aborts_of_unknown_requests(server: FakeServer, parsing_s: float) -> None:
    """As SGLang does; a request is known once its prompt has been parsed."""
    answer, known = server.answer, set[str]()

    def later(handler: Handler, body: Any) -> None:
        if handler.path == "/generate":
            time.sleep(parsing_s)
            known.add(body["rid"])
        if handler.path == "/abort_request" and body["rid"] not in known:
            handler.reply(200, b"{}")
        else:
            answer(handler, body)

    server.answer = later  # type: ignore[method-assign]


def test_an_abort_that_overtakes_its_request_is_sent_again(model: str) -> None:
    """To the server that has the request."""
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        for server in servers:
            server.pace_s = lambda body: 3.0  # 24 s in all
            ignores_aborts_of_unknown_requests(server, 0.5)

        async def scenario() -> Sequence[GenerateOutput]:
            tasks = [asyncio.create_task(engine.generate_one(r, SAMPLING)) for r in REQUESTS[:2]]
            while sum(server.count("/generate") for server in servers) < 2:
                await asyncio.sleep(0.01)
            await engine.abort([10])
            (output,) = await asyncio.gather(tasks[0])
            assert not tasks[1].done(), "it was not aborted"
            await engine.abort()
            await engine.leave_loop()
            tasks[1].cancel()
            return [output]

        (output,) = asyncio.run(scenario())
        assert output.finish_reason == "abort" and 0 < len(output.tokens) < 8
        (sent,) = (s for s in servers if s.count("/abort_request") > 1)
        rids = [body["rid"] for path, body in sent.seen if path == "/generate"]
        aborted = [body["rid"] for path, body in sent.seen if path == "/abort_request"]
        assert set(aborted) == set(rids) and len(aborted) == 2


def test_a_request_that_its_server_gave_up_goes_to_another(model: str) -> None:
    """Status 200, and the finish reason says 503."""
    full = {"type": "abort", "status_code": 503, "message": "full"}
    given_up = changed(lambda answer: answer["meta_info"].update(finish_reason=full))
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        servers[0].faults = [given_up] * 50
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.failure is None and output.tokens
        assert [server.count("/generate") for server in servers] == [1, 1]


def test_retries_are_counted_for_requests_that_outlive_a_step(model: str) -> None:
    """Metrics are taken while the request is under way."""

    def refused_later(handler: Handler, answer: Answer) -> None:
        time.sleep(0.5)
        handler.reply(503, b"no", "text/plain")

    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.faults = [refused_later]

        async def scenario() -> None:
            task = asyncio.create_task(engine.generate_one(REQUESTS[0], SAMPLING))
            while not server.count("/generate"):
                await asyncio.sleep(0.01)
            assert engine.take_metrics()["engine/retries"] == 0
            await task
            await engine.leave_loop()

        asyncio.run(scenario())
        metrics = engine.take_metrics()
        assert metrics["engine/retries"] == metrics["engine/status_503"] == 1
        assert "engine/status_503" not in engine.take_metrics()
