"""Every way in which a server may fail, against servers that do: what is tried again, what is
rejected, and that a run survives."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.servers import requests, server_pool
from slime_like.servers.http import ControlClient, RequestFailed
from slime_like.servers.router import Router
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.weight_sync.servers import UpdateIncomplete
from tests.fake_sglang import (
    ATTEMPTS,
    REQUESTS,
    SAMPLING,
    Answer,
    FakeServer,
    Fault,
    Handler,
    changed,
    death,
    death_in_the_middle,
    drip,
    engine_of,
    fake_servers,
    make_served_model,
    silence,
    status,
    text,
    weights_of,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


def test_servers_that_start_slowly_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start of minutes must not look like a hang: who is waited for, how long, and until when."""
    monkeypatch.setattr(server_pool, "START_TICK_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens: connections are refused
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        health = HealthSettings(start_s=1.5, timeout_s=0.5)
        pool = ServerPool([url], [], None, health, 1.0, api=SglangApi())
        with caplog.at_level("INFO"), pytest.raises(RunError, match="no answer from the engines"):
            pool.start()
        pool.close()
    ticks = [text for text in caplog.messages if "engines answer after" in text]
    assert 2 <= len(ticks) <= 5
    assert ticks[0].startswith("0 of 1 engines answer") and ticks[0].endswith(f"waiting for {url}")
    assert "at most 1.5 s" in ticks[0]


def expected(model: str) -> list[GenerateOutput]:
    engine = LocalEngine(model, None)
    engine.update_weights(weights_of(model), 1)
    return engine.generate(REQUESTS, SAMPLING)


def assert_right(outputs: list[GenerateOutput], model: str) -> None:
    for output, right in zip(outputs, expected(model), strict=True):
        assert (output.sample_id, output.tokens, output.finish_reason, output.weight_versions) == (
            right.sample_id, right.tokens, right.finish_reason, (1,) * len(right.tokens),
        ), output.failure  # fmt: skip
        assert output.log_probs == pytest.approx(right.log_probs, abs=1e-5)


def test_what_servers_answer_is_what_the_local_engine_samples(model: str) -> None:
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        assert all(server.count("/generate") for server in servers)  # both work
        reported = servers[0].seen[-1][1]["sampling_params"]
        assert reported["max_new_tokens"] == 8 and reported["top_k"] == -1
        metrics = engine.take_metrics()
        assert (
            metrics["engine/ready"] == 2
            and metrics["engine/dropped"] == 0
            and metrics["engine/weight_update_gb"] > 0
        )


# what goes wrong first -> the word under which it is counted. All of these are tried again, and
# succeed.
PASSING: dict[str, tuple[Fault, str]] = {
    "status 500": (status(500), "status_500"),
    "status 503": (status(503), "status_503"),
    "too many requests": (status(429), "status_429"),
    "hang": (silence(5), "total_timeout"),
    "slow drip": (drip, "total_timeout"),
    "death in the middle of the body": (death_in_the_middle, "connection_lost"),
    "given up by the server": (
        changed(lambda a: a["meta_info"].update(finish_reason={"type": "abort", "status_code": 503, "message": "full"})), "refused_503",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_costs_time_only(model: str, name: str) -> None:
    fault, counted = PASSING[name]
    slow = counted == "total_timeout"
    with (
        fake_servers(model, 2) as servers,
        engine_of(model, servers, total_s=1.0 if slow else 10.0) as engine,
    ):
        servers[0].faults = servers[1].faults = [fault]
        start = time.monotonic()
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        assert time.monotonic() - start < 100
        metrics = engine.take_metrics()
        assert (
            metrics[f"engine/{counted}"] == metrics["engine/retries"] >= 1
            and metrics["engine/dropped"] == 0
        )


def test_a_lasting_fault_is_tried_a_few_times_and_dropped(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.faults = [status(500, "out of memory")] * ATTEMPTS
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert (output.tokens, output.finish_reason) == ((), "abort")
        assert (
            output.failure is not None
            and f"{server.url}/generate: status 500: out of memory" in output.failure
        )
        assert server.count("/generate") == ATTEMPTS
        assert engine.take_metrics()["engine/dropped"] == 1
        assert_right(engine.generate(REQUESTS, SAMPLING), model)


def meta(**changes: object) -> Callable[[Answer], None]:
    return lambda answer: answer["meta_info"].update(changes)


def log_probs(change: Callable[[list], list]) -> Callable[[Answer], None]:
    return lambda answer: answer["meta_info"].update(
        output_token_logprobs=change(answer["meta_info"]["output_token_logprobs"])
    )


def compressed(handler: Handler, answer: Answer) -> None:
    """0.3 MB of gzip that are 300 MB; nobody asked for it."""
    body = gzip.compress(b" " * 300 * 2**20, compresslevel=1)
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


NESTED: list = []
for _ in range(300):
    NESTED = [NESTED]
# Status 200, and not what was asked for -> words of the rejection.
WRONG: dict[str, tuple[Fault, str]] = {
    "html": (text("<html>502 Bad Gateway</html>"), "invalid JSON"),
    "garbage": (text("\x00\x01{{", "application/json"), "invalid JSON"),
    "a list": (text("[1, 2]", "application/json"), "the content is [1, 2]"),
    "text alone": (text(json.dumps({"text": "hello"}), "application/json"), "meta_info is missing"),
    "fewer log-probs": (changed(log_probs(lambda p: p[:-1])), "log-probs for"),
    "more log-probs": (changed(log_probs(lambda p: [*p, p[0]])), "log-probs for"),
    "no log-probs": (changed(meta(output_token_logprobs=None)), "meta_info.output_token_logprobs is None"),
    "NaN": (changed(log_probs(lambda p: [[float("nan"), *p[0][1:]], *p[1:]])), "output_token_logprobs[0][0] is nan"),
    "minus infinity": (changed(log_probs(lambda p: [[float("-inf"), *p[0][1:]], *p[1:]])), "is -inf"),
    "None": (changed(log_probs(lambda p: [*p[:-1], [None, *p[-1][1:]]])), "is None"),
    "a word": (changed(log_probs(lambda p: [["-1", *p[0][1:]], *p[1:]])), "is '-1'"),
    "above 0": (changed(log_probs(lambda p: [[0.5, *p[0][1:]], *p[1:]])), "is 0.5"),
    "of another token": (changed(log_probs(lambda p: [[p[0][0], p[0][1] + 1, None], *p[1:]])), "and the token there is"),
    "too many tokens": (changed(lambda a: a.update(output_ids=[9] * 9)), "expected 1 to 8"),
    "no tokens": (changed(lambda a: a.update(output_ids=[])), "0 tokens"),
    "tokens that are words": (changed(lambda a: a.update(output_ids=["a"])), "output_ids[0] is 'a'"),
    "another count": (changed(meta(completion_tokens=99)), "the server counted 99"),
    "an answer to another request": (changed(meta(id="r-9\n")), "the response is to request 'r-9\\n'"),
    "another prompt": (changed(meta(prompt_tokens=4)), "the server read 4"),
    "an unknown finish reason": (changed(meta(finish_reason="stop")), "meta_info.finish_reason is 'stop'"),
    "versions of other tokens": (changed(meta(weight_versions=[{"version": "1", "start": 0, "end": 99}])), "weight versions of tokens 0 to 99 after 0 of 8 tokens"),
    "versions with a hole": (changed(meta(weight_versions=[{"version": "1", "start": 1, "end": 8}])), "weight versions of tokens 1 to 8 after 0"),
    "a span of 1e13 tokens": (changed(meta(weight_versions=[{"version": "1", "start": 0, "end": 10**13}])), "weight versions of tokens 0 to 10000000000000 after 0"),
    "a version that is infinite": (changed(meta(weight_versions=None, weight_version=float("inf"))), "weight version inf"),
    "a version that is a list": (changed(meta(weight_versions=None, weight_version=[1])), "weight version [1]"),
    "versions that are text": (changed(meta(weight_versions="1")), "meta_info.weight_versions is '1': Input should be a valid array"),
    "nested too deep": (text("[" * 100_000, "application/json"), "recursion limit exceeded"),
    "nested deep": (changed(lambda a: a.update(output_ids=NESTED)), "recursion limit exceeded"),
    "a status that is a word": (changed(meta(finish_reason={"type": "abort", "status_code": "abc"})), "finish_reason.status_code is 'abc'"),
    "an integer of 400 digits": (changed(log_probs(lambda p: [[-(10**400), *p[0][1:]], *p[1:]])), "output_token_logprobs[0][0] is -1"),
    "far below 0": (changed(log_probs(lambda p: [[-1e300, *p[0][1:]], *p[1:]])), "output_token_logprobs[0][0] is -1e+300"),
    "a token of 2**70": (changed(lambda a: a.update(output_ids=[2**70])), f"output_ids[0] is {2**70}, not a token id"),
    "a token beyond the vocabulary": (changed(lambda a: a.update(output_ids=[64])), "output_ids[0] is 64, not a token id from 0 to 63"),
    "a lone surrogate": (changed(meta(finish_reason="\ud800\n\x1b[31m")), "invalid JSON (unexpected end of hex escape"),
    "compressed": (compressed, "encoded as 'gzip'"),
    "too large": (text("[" + "1, " * 2**20 + "1]", "application/json"), "more than "),
}  # fmt: skip


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[tuple[FakeServer, SglangEngine]]:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        yield server, engine


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_a_rejected_sample(
    one: tuple[FakeServer, SglangEngine], name: str
) -> None:
    """Nothing of it is passed on, padded or cut; it is counted, not asked for again, and the
    request's id is reported."""
    server, engine = one
    fault, words = WRONG[name]
    server.faults, before = [fault], server.count("/generate")
    (output,) = engine.generate(REQUESTS[:1], SAMPLING)
    assert (output.sample_id, output.tokens, output.log_probs, output.finish_reason) == (
        10,
        (),
        (),
        "abort",
    )
    rid = server.seen[-1][1]["rid"]
    assert output.failure is not None and rid in output.failure and words in output.failure
    assert server.count("/generate") == before + 1
    metrics = engine.take_metrics()
    assert (
        metrics["engine/rejected"] + metrics["engine/dropped"] == 1
        and metrics["engine/retries"] == 0
    )


def versions(version: object) -> Fault:
    """All tokens of the answer under this version."""
    return changed(
        lambda a: a["meta_info"].update(
            weight_versions=[{"version": version, "start": 0, "end": len(a["output_ids"])}]
        )
    )


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("default", "'default' was never sent"),
        ("999", "weight version 999, and only 2 can"),
        ("-7", "weight version -7, and only 2 can"),
        ("1", "weight version 1, and only 2 can"),
    ],
)
def test_a_server_with_other_weights_costs_one_sample_and_gets_the_right_ones(
    model: str, version: str, words: str
) -> None:
    """Weights that were never sent, and those of before the request: the sample is rejected, the
    server is out, gets the current weights and answers again."""
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        engine.update_weights(weights_of(model), 2)
        server.faults, updates = [versions(version)], server.count("/update_weights_from_disk")
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.finish_reason == "abort" and output.tokens == ()
        assert output.failure is not None and words in output.failure
        assert server.url in output.failure
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)  # waits for the server
        assert output.weight_versions == (2,) * len(output.tokens) and output.failure is None
        assert server.count("/update_weights_from_disk") == updates + 1
        metrics = engine.take_metrics()
        assert metrics["engine/evictions"] == metrics["engine/wrong_version"] == 1


def test_a_server_that_keeps_answering_under_other_weights_stays_out(model: str) -> None:
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        servers[0].faults = [versions("999")] * 1000
        rejected = 0
        for _ in range(200):
            # one by one: requests that are under way with it are rejected as well
            outputs = engine.generate(REQUESTS[:1], SAMPLING)
            rejected += sum(output.finish_reason == "abort" for output in outputs)
            if rejected == 3 and not any(w.returning for w in engine.pool.workers):
                break
            time.sleep(0.05)
        assert rejected == 3
        assert [w.url for w in engine.pool.alive()] == [servers[1].url]
        assert_right(engine.generate(REQUESTS, SAMPLING), model)


def test_an_eviction_just_after_the_response_cancels_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request has found the same fault: this one still reports it and goes elsewhere."""
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        post_once = requests.post_once

        async def evicted_afterwards(*arguments: Any) -> bytes:
            answer = await post_once(*arguments)
            for worker in engine.pool.workers:
                for task in worker.in_flight:
                    asyncio.get_running_loop().call_soon(task.cancel, "evicted")
            return answer

        monkeypatch.setattr(requests, "post_once", evicted_afterwards)
        servers[0].faults = [versions("999")] * 1000
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.failure is None or "weight version 999" in output.failure


def test_a_server_behind_a_router_that_has_other_weights_is_found(model: str) -> None:
    """The router does not say who answered: the servers are asked directly, and the one is out."""
    with fake_servers(model, 2) as (server, fake):
        router = Router(fake.url, None, 1.0)
        with engine_of(model, [server], router=router, synced=False) as engine:
            fake.workers = [server.url]
            engine.update_weights(weights_of(model), 1)
            fake.engine.update_weights(weights_of(model), 1)
            fake.faults = [versions("999")] * 100
            (output,) = engine.generate(REQUESTS[:1], SAMPLING)
            assert output.failure is not None and "weight version 999" in output.failure
            assert_right(engine.generate(REQUESTS, SAMPLING), model)
            assert fake.count("/generate") == 1
            engine.update_weights(weights_of(model), 2)
            engine.generate(REQUESTS[:1], SAMPLING)
            assert fake.count("/generate") == 2  # the router is trusted again


def test_weights_that_change_during_a_request_are_no_fault(model: str) -> None:
    """Tokens before the update are of the old version, those behind it of the new one, and no
    server goes back to an older one."""

    def ends_under(last: str) -> Fault:
        def spans(answer: Answer) -> None:
            count = len(answer["output_ids"])
            parts = [("1", 0, 1), (last, 1, count)]
            answer["meta_info"]["weight_versions"] = [
                {"version": v, "start": a, "end": b} for v, a, b in parts
            ]

        return changed(spans)

    async def ask_and_update(engine: SglangEngine) -> GenerateOutput:
        task = asyncio.create_task(engine.generate_one(REQUESTS[0], SAMPLING))
        while not server.count("/generate"):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.update_weights, weights_of(model), 2)
        server.pace_s = lambda body: 0.0
        return await task

    for last, legal in (("2", True), ("3", False)):
        with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
            server.pace_s = lambda body: 0.3
            server.faults = [ends_under(last)]
            output = asyncio.run(ask_and_update(engine))
            assert (output.failure is None) == legal, output.failure
            if legal:
                assert output.weight_versions == (1, *[2] * (len(output.tokens) - 1))


GARBAGE = (
    "null", "[]", "7", '"x"', "<html>", "[" * 5000, '{"weight_version": 1}', '{"weight_version": null}', '{"tp_size": 1e13}',
    '{"tp_size": "a"}', '{"workers": [7]}', '{"workers": [{"url": 7}]}', '{"workers": [{"url": "http://[", "id": 1}]}', '{"workers": {"a": 1}}',
)  # fmt: skip


def test_garbage_of_control_calls_is_a_sentence_and_kills_no_thread(model: str) -> None:
    """Of /model_info, /server_info and /workers, with status 200."""
    with fake_servers(model, 3) as (server, late, fake):
        router = Router(fake.url, None, 1.0)
        with engine_of(model, [server, late], router=router) as engine:
            assert engine.pool is not None and engine._updater is not None
            watcher, version = engine.pool._monitor, 1
            for body in GARBAGE:
                fake.garbage["/workers"] = body.encode()
                for path in ("/model_info", "/server_info"):
                    late.garbage[path] = body.encode()
                with contextlib.suppress(RunError):  # of the router, by its name
                    engine.update_weights(weights_of(model), version + 1)
                with contextlib.suppress(RunError, RequestFailed):
                    engine._updater.servers.size(engine.pool.workers[1])
                engine.pool.handle_added_servers()
                engine.pool._wake.set()
                wait_until(lambda: not engine.pool._wake.is_set())
                assert watcher is not None and watcher.is_alive()
                assert engine.pool.workers[0].alive
                fake.garbage, late.garbage = {}, {}
                version += 2
                wait_until(lambda: len(engine.pool.alive()) == 2)
                engine.update_weights(weights_of(model), version)
                wait_until(lambda: len(engine.pool.ready()) == 2)
            fake.faults = [status(503)] * 100  # it only names servers
            outputs = engine.generate(REQUESTS, SamplingParams(max_new_tokens=2))
            assert {v for o in outputs for v in o.weight_versions} == {version}


def test_a_call_that_answers_success_false_has_failed(model: str) -> None:
    with fake_servers(model, 2) as servers, engine_of(model, servers, synced=False) as engine:
        servers[0].garbage["/update_weights_from_disk"] = (
            b'{"success": false, "message": "no\\nway"}'
        )
        engine.update_weights(weights_of(model), 1)
        assert [w.url for w in engine.pool.ready()] == [servers[1].url]
        client = ControlClient(1.0)
        with pytest.raises(RequestFailed, match="disk: the call failed: no way"):
            client.call(f"{servers[0].url}/update_weights_from_disk", {}, timeout_s=30)
        client.close()
        with pytest.raises(RequestFailed, match="the run ends"):
            client.call(f"{servers[0].url}/update_weights_from_disk", {}, timeout_s=30)


@pytest.mark.parametrize("in_header", [False, True])
def test_a_control_call_has_a_total_deadline(in_header: bool) -> None:
    """A server that sends a byte each 0.05 s, in the body or in a header, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def drip_for_ever() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                if not in_header:
                    connection.sendall(b"Content-Length: 100000\r\n\r\n")
                while not ended.wait(0.05):
                    connection.sendall(b"a")

        thread = threading.Thread(target=drip_for_ever)
        thread.start()
        client = ControlClient(1.0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/model_info"
        with pytest.raises(RequestFailed, match=f"{url}: no whole answer within 0.5 s"):
            client.call(url, timeout_s=0.5, method="GET")
        client.close()
        ended.set()
        thread.join(30)
        assert not thread.is_alive()


class TooMuch(BaseHTTPRequestHandler):
    """Answers twice at once, the second time with -1, and sets its own cookie each time."""

    protocol_version = "HTTP/1.1"
    cookies: list[str | None] = []  # noqa: RUF012 (of all requests)

    def do_GET(self) -> None:
        self.cookies.append(self.headers.get("Cookie"))
        head = f"HTTP/1.1 200 OK\r\nSet-Cookie: k{len(self.cookies)}=1\r\nContent-Length: 8\r\n\r\n"
        self.wfile.write(f'{head}{{"a": 1}}{head}{{"a":-1}}'.encode())

    def log_message(self, *args: object) -> None: ...


def test_what_a_server_sends_too_much_reaches_no_other_call() -> None:
    """A surplus response is no answer to the next call, and cookies go to no other server there."""
    TooMuch.cookies.clear()
    client = ControlClient(1.0)
    with ExitStack() as stack:
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), TooMuch) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        for server in servers * 2:
            url = f"http://127.0.0.1:{server.server_address[1]}/model_info"
            assert client.call(url, timeout_s=20, method="GET") == {"a": 1}
        client.close()
    assert TooMuch.cookies == [None] * 4


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_a_refused_request_is_not_sent_again(
    one: tuple[FakeServer, SglangEngine], code: int
) -> None:
    server, engine = one
    server.faults, before = [status(code, "not you")], server.count("/generate")
    (output,) = engine.generate(REQUESTS[:1], SAMPLING)
    assert (
        output.failure is not None
        and f"{server.url}/generate: status {code}: not you" in output.failure
    )
    assert server.count("/generate") == before + 1 and engine.take_metrics()["engine/dropped"] == 1


def test_samples_of_a_server_that_dies_go_elsewhere(model: str) -> None:
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        servers[0].faults = [silence(5)] * 3
        threading.Timer(0.15, servers[0].stop).start()
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        wait_until(lambda: [w.url for w in engine.pool.alive()] == [servers[1].url])
        engine.check_health()
        assert engine.weight_version == 1  # the one that is left has the weights
        assert engine.take_metrics()["engine/evictions"] == 1
        assert servers[1].seen and servers[1].count("/generate") >= 3


def test_samples_of_a_server_that_hangs_go_elsewhere(model: str) -> None:
    """It takes connections and answers nothing: its probes fail, and what waits for it is sent to
    the other long before the deadline of a minute."""
    with (
        fake_servers(model, 2) as servers,
        engine_of(model, servers, total_s=60, probe_timeout_s=0.5) as engine,
    ):
        servers[0].hung = True
        start = time.monotonic()
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        assert time.monotonic() - start < 55
        metrics = engine.take_metrics()
        assert (
            metrics["engine/evicted"] >= 1
            and metrics["engine/evictions"] == 1
            and metrics["engine/ready"] == 1
        )


def test_a_router_that_sees_no_server_costs_time_only(model: str) -> None:
    """It takes healthy servers for dead ones (its circuits are open), and requests go to them
    directly."""
    with (
        fake_servers(model, 2) as (server, fake),
        engine_of(model, [server], router=Router(fake.url, None, 1.0), synced=False) as engine,
    ):
        fake.workers = [server.url]
        fake.faults = [status(503, "No available workers (all circuits open or unhealthy)")] * 100
        engine.update_weights(weights_of(model), 1)
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        assert (fake.count("/generate"), server.count("/generate")) == (3, 3)
        metrics = engine.take_metrics()
        assert (
            metrics["engine/status_503"] == metrics["engine/retries"] == 3
            and metrics["engine/dropped"] == 0
        )


@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_is_added_to_the_router_gets_weights_or_no_requests(
    model: str, joins: bool
) -> None:
    """One is there before the run, and another is added later. Where the run names its servers,
    neither is its own."""
    with fake_servers(model, 4) as (server, early, late, fake):
        fake.workers = [early.url, server.url]
        router = Router(fake.url, None, 1.0)
        with engine_of(model, [server], router=router, joined_by_router=joins) as engine:
            fake.workers.append(late.url)
            expected = {server.url, early.url, late.url} if joins else {server.url}
            wait_until(
                lambda: {w.url for w in engine.pool.ready()} == expected == set(fake.workers)
            )
            assert [s.version for s in (early, late)] == (["1"] * 2 if joins else ["default"] * 2)
            fake.faults = [status(503)] * 100  # it only names servers
            assert_right(engine.generate(REQUESTS, SAMPLING), model)


def test_end_tokens_are_ignored_where_that_is_asked_for(model: str) -> None:
    request = GenerateRequest(10, (3, 5, 7), seed=0)
    plain, forced = (
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, ignore_end_tokens=True),
    )
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        bodies = []
        for sampling in (plain, forced):
            (output,) = engine.generate([request], sampling)
            bodies.append(server.seen[-1][1]["sampling_params"]["ignore_eos"])
        assert (
            bodies == [False, True]
            and len(output.tokens) == 40
            and output.finish_reason == "length"
        )
        with pytest.raises(ValueError, match="ignores the stop tokens \\[1\\]"):
            engine.generate([request], SamplingParams(stop_token_ids=(1,), ignore_end_tokens=True))


def test_a_server_that_comes_back_gets_the_weights_before_requests(model: str) -> None:
    with (
        fake_servers(model, 2) as servers,
        engine_of(model, servers, probe_timeout_s=0.5) as engine,
    ):
        servers[0].hung = True
        wait_until(lambda: len(engine.pool.ready()) == 1)
        updates = servers[0].count("/update_weights_from_disk")
        servers[0].hung = False
        wait_until(lambda: len(engine.pool.ready()) == 2)
        assert servers[0].count("/update_weights_from_disk") == updates + 1
        assert_right(engine.generate(REQUESTS, SAMPLING), model)


def test_when_no_server_is_left(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.stop()
        outputs = engine.generate(REQUESTS, SAMPLING)
        assert all(
            (o.failure is not None and server.url in o.failure) or "no engine" in str(o.failure)
            for o in outputs
        )
        wait_until(lambda: not engine.pool.alive())
        with pytest.raises(RunError, match=f"no engine answers any more: {server.url}"):
            engine.check_health()


def test_an_abort_returns_at_once_and_is_sent_to_the_server(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.pace_s = lambda body: 0.3  # else the answer may be there before the abort
        server.faults = [
            changed(
                lambda a: a["meta_info"].update(
                    finish_reason={"type": "abort", "message": "", "status_code": None}
                )
            )
        ]

        async def scenario() -> GenerateOutput:
            task = asyncio.create_task(engine.generate_one(REQUESTS[0], SAMPLING))
            while not server.count("/generate"):
                await asyncio.sleep(0.01)
            await engine.abort([10])
            return await task

        output = asyncio.run(scenario())
        assert (
            output.finish_reason == "abort" and output.failure is None and output.tokens
        )  # partial, with its log-probs
        generate, abort = (
            body for path, body in server.seen if path in ("/generate", "/abort_request")
        )
        assert abort == {"rid": generate["rid"]}


# --- weights


def test_a_server_that_refuses_an_update_is_out(model: str) -> None:
    with fake_servers(model, 2) as servers, engine_of(model, servers, synced=False) as engine:
        servers[0].refused["/update_weights_from_disk"] = (400, "no such folder")
        engine.update_weights(weights_of(model), 1)
        assert engine.weight_version == 1 and [w.url for w in engine.pool.ready()] == [
            servers[1].url
        ]
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        assert servers[0].count("/generate") == 0


def test_an_update_that_all_refuse_stops_the_run(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server], synced=False) as engine:
        server.refused["/update_weights_from_disk"] = (400, "no such folder")
        with pytest.raises(RunError, match=r"failed on every engine: .*status 400.*no such folder"):
            engine.update_weights(weights_of(model), 1)
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.generate(REQUESTS, SAMPLING)


def test_weights_in_requests(model: str) -> None:
    """In several buckets to two servers; what the second of them refuses in the middle, the first
    still gets."""
    with (
        fake_servers(model, 2) as servers,
        engine_of(model, servers, transport="tensor", synced=False, buffer_bytes=3000) as engine,
    ):
        engine.update_weights(weights_of(model), 1)
        assert all(server.count("/update_weights_from_tensor") > 3 for server in servers)
        assert_right(engine.generate(REQUESTS, SAMPLING), model)
        servers[1].refused["/update_weights_from_tensor"] = (400, "not this one")
        before = servers[1].count("/update_weights_from_tensor")
        engine.update_weights(((name, tensor * 1.1) for name, tensor in weights_of(model)), 2)
        assert engine.weight_version == 2 and [w.url for w in engine.pool.ready()] == [
            servers[0].url
        ]
        assert (
            servers[1].count("/update_weights_from_tensor") == before + 1
        )  # no other after the one that it refused
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.weight_versions == (2,) * len(output.tokens)


@pytest.mark.parametrize("transport", ["broadcast", "tensor"])
def test_a_server_that_does_not_report_its_size_is_out(model: str, transport: str) -> None:
    """The update is given up, not the run: all ranks make another attempt, for the servers that are
    left."""
    with (
        fake_servers(model, 1) as (server,),
        engine_of(model, [server], transport=transport, synced=False) as engine,
    ):
        server.refused["/server_info"] = (500, "no")
        engine.update_weights(weights_of(model), 1)
        assert (
            engine.weight_version == -1 and not engine.pool.ready() and engine.pool.evictions == 1
        )


def test_memory_is_given_back_where_it_was_taken(model: str) -> None:
    """A server that was out between the two has been started again: it would end over being asked to
    take back what it has."""
    with fake_servers(model, 2) as servers, engine_of(model, servers, colocated=True) as engine:
        engine.release_memory()
        engine.release_memory()
        assert engine.weight_version == -1 and [
            s.count("/release_memory_occupation") for s in servers
        ] == [1, 1]
        engine.pool.workers[1].evictions += 1
        engine.update_weights(weights_of(model), 2)
        assert [s.count("/resume_memory_occupation") for s in servers] == [1, 0]
        paths = [path for path, _ in servers[0].seen]
        assert paths.index("/resume_memory_occupation") > paths.index(
            "/update_weights_from_disk"
        )  # of the first update
        assert "/update_weights_from_disk" in paths[paths.index("/resume_memory_occupation") :]
        assert_right(
            [
                replace(o, weight_versions=(1,) * len(o.tokens))
                for o in engine.generate(REQUESTS, SAMPLING)
            ],
            model,
        )


def test_servers_continue_after_an_update_that_is_made_again(model: str) -> None:
    """They stay paused between the two attempts, and not after the second."""
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        update = engine._updater.update

        def once(weights: object, version: int) -> None:
            engine._updater.update = update
            raise UpdateIncomplete("a server failed in the middle")

        engine._updater.update = once
        states = []
        for _ in range(2):
            engine.update_weights(weights_of(model), 2)
            paths = [path for path, _body in server.seen]
            paused_at, went_on_at = (
                len(paths) - paths[::-1].index(f"/{word}_generation")
                for word in ("pause", "continue")
            )
            states.append(
                (engine.weight_version, "goes on" if went_on_at > paused_at else "paused")
            )
        assert states == [(-1, "paused"), (2, "goes on")]
        assert len(engine.generate(REQUESTS, SAMPLING)[0].tokens) > 0


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/begin_weight_update"])
def test_a_refused_broadcast_ends_in_bounded_time(model: str, path: str) -> None:
    with (
        fake_servers(model, 1) as (server,),
        engine_of(
            model, [server], transport="broadcast", synced=False, update_timeout_s=3
        ) as engine,
    ):
        server.refused[path] = (400, "not now")
        start = time.monotonic()
        with contextlib.suppress(RunError):
            engine.update_weights(weights_of(model), 1)
        assert engine.weight_version == -1 and time.monotonic() - start < 100
        assert not engine.pool.ready()


def test_another_version_than_was_sent_stops_the_run(model: str) -> None:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.get = lambda handler: handler.reply(200, b'{"weight_version": "7"}')  # type: ignore[method-assign]
        with pytest.raises(
            RunError,
            match=r"reports weight version '7' after an update to 2; does another run use it\?",
        ):
            engine.update_weights(weights_of(model), 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update({"model.layers.7.x": torch.zeros(1)}), "unknown: model.layers.7.x"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"of another shape: model.norm.weight \[3\] \(checkpoint: \[32\]\)"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_checkpoints_stop_the_run(
    model: str, spoil: Callable[[dict], object], words: str
) -> None:
    weights = dict(weights_of(model))
    spoil(weights)
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        server.engine.update_weights = lambda weights, version: None  # type: ignore[method-assign]
        with pytest.raises(RunError, match=words):
            engine.update_weights(iter(weights.items()), 2)


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_server_that_is_lost_in_a_probe_is_out_and_the_others_are_probed(model: str) -> None:
    """As at any other time: the run continues with the others. One that answers wrongly ends it, and
    so does the last one."""
    with fake_servers(model, 2) as servers, engine_of(model, servers) as engine:
        servers[0].probe_faults = [death] * len(REQUESTS)
        ((url, outputs),) = engine.probe(REQUESTS, SAMPLING)
        assert url == servers[1].url
        assert_right(outputs, model)
        assert engine.pool is not None and engine.pool.evictions == 1
    with fake_servers(model, 1) as servers, engine_of(model, servers) as engine:
        servers[0].probe_faults = [status(503)] * len(REQUESTS)
        with pytest.raises(RunError, match="no engine answers after a weight update"):
            engine.probe(REQUESTS, SAMPLING)
    with fake_servers(model, 1) as servers, engine_of(model, servers) as engine:
        servers[0].probe_faults = [changed(lambda answer: answer.pop("meta_info"))]
        with pytest.raises(RunError, match="gives a wrong answer after a weight update"):
            engine.probe(REQUESTS, SAMPLING)
