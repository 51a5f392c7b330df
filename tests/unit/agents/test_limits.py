"""What a client of the gateway can cost the others: time, memory, turns, files, the port."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import httpx
import pytest

from slime_like.agents import server
from slime_like.agents.rollouts import CHARACTERS_PER_TOKEN
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import ParsedRequest, Session, SessionLimits
from slime_like.agents.templates import ChatTemplate
from slime_like.errors import RunError
from slime_like.origin_check import OriginCheck
from tests.unit.agents.test_server import (
    END,
    TOKENIZER,
    Engine,
    model_of,
    open_gateway,
    post,
    run,
    session_of,
    user,
)

PATH = "/v1/chat/completions"


def test_a_text_that_is_far_too_long_is_not_tokenised() -> None:
    template = ChatTemplate(TOKENIZER, {END}, max_characters=CHARACTERS_PER_TOKEN * 500)
    session = Session(1, model_of(Engine()), template, limits=SessionLimits(positions=500))

    async def talk() -> None:
        async with open_gateway({"key": session}, max_body=2**24) as (client, _):
            client.headers["authorization"] = "Bearer key"
            await post(client, PATH, messages=[user("word " * 50)])
            start = time.process_time()
            answer = await post(client, PATH, 400, messages=[user("word " * 2**20)])
            assert "context_length_exceeded" in str(answer)
            assert time.process_time() - start < 2.0

    asyncio.run(talk())


def test_a_session_grows_with_its_length() -> None:
    """And not with the square: a turn keeps what its parent does not."""

    def grown(turns: int) -> int:
        engine = Engine()
        model = model_of(engine)
        model.sampling = replace(model.sampling, max_new_tokens=100_000)
        template = ChatTemplate(TOKENIZER, {END})
        session = Session(1, model, template, limits=SessionLimits(turns=1000))
        history: list[Any] = []

        async def talk() -> None:
            for i in range(turns):
                history.append(user(f"question {i} " + "word " * 50))
                request = ParsedRequest(tuple(dict(message) for message in history))
                (choice,) = await session.answer(request)
                history.append(choice.message)

        tracemalloc.start()
        asyncio.run(talk())
        history.clear()
        engine.prompts.clear()
        engine.written.clear()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(session.tree.turns) == turns
        last = session.tree.turns[-1]
        assert len(last.messages) == 2 * turns - 1 and len(last.path) == turns
        return size

    grown(2)  # what the first use of everything takes
    few = grown(10)
    many = grown(60)
    assert many < 9 * few, (few, many)


def test_a_client_that_leaves_uses_up_no_turn() -> None:
    """And the main conversation continues when it asks again."""
    session = session_of(Engine(slow=0.2), SessionLimits(turns=2))

    async def talk(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(PATH, json={"messages": [user("q")]}, timeout=0.05)
        await asyncio.sleep(0.1)
        assert session.counts["answers"] == 0
        await post(client, PATH, messages=[user("q")])
        await post(client, PATH, messages=[user("r")])
        await post(client, PATH, 429, messages=[user("s")])

    run(session, talk)


def test_a_surrogate_in_a_conversation_is_replaced() -> None:
    """In the first prompt, and in one that continues an answer."""
    engine = Engine("a", "b")
    session = session_of(engine)

    async def talk(client: httpx.AsyncClient) -> None:
        messages: list[Any] = [user("x\ud800y")]
        for _ in range(2):
            answer = await client.post(
                PATH,
                content=__import__("json").dumps({"messages": messages}),
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], user("z\udfffz")]

    run(session, talk)
    assert "x?y" in engine.prompts[0] and "z?z" in engine.prompts[1]


FLOOD = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from tests.unit.agents.test_server import Engine, open_gateway, post, session_of, user
async def main():
    async with open_gateway({"key": session_of(Engine())}) as (client, gateway):
        client.headers["authorization"] = "Bearer key"
        port = int(gateway.url.rsplit(":", 1)[1])
        flood = await asyncio.create_subprocess_exec(sys.executable, "-c", '''
import socket, sys, time
kept = []
for _ in range(370):
    s = socket.socket(); s.setblocking(False); s.connect_ex(("127.0.0.1", int(sys.argv[1]))); kept.append(s)
print("made", flush=True); time.sleep(60)
''', str(port), stdout=asyncio.subprocess.PIPE)
        await flood.stdout.readline()
        await asyncio.sleep(0.5)
        try:
            await asyncio.wait_for(post(client, "/v1/chat/completions", messages=[user("q")]), 15)
        finally:
            flood.kill()
            await flood.wait()
        await post(client, "/v1/chat/completions", messages=[user("q")])
asyncio.run(main())
print("answered")
"""


def test_a_flood_leaves_a_file_for_the_next_connection() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOOD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "answered\n", done.stderr


def test_connections_are_what_the_limit_of_files_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1024)]
    monkeypatch.setattr(server.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(server.resource, "setrlimit", lambda _, both: limits.append(both))
    assert server.affordable(512) == 512 and server.affordable(5000) == 1024 - server.OTHER_FILES
    limits.append((256, 4096))
    assert server.affordable(1000) == 1000 and limits[-1] == (1000 + server.OTHER_FILES, 4096)
    limits.append((64, 64))
    assert server.affordable(1000) == server.MIN_CONNECTIONS


def test_a_connection_with_an_unread_request_is_not_closed_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request arrives in the moment in which its connection, the oldest idle one, would go."""
    make_room = server._Connection._make_room
    request = b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def answer(reader: asyncio.StreamReader) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 4")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if b"-length" in x)
        await reader.readexactly(length)

    async def work() -> None:
        gateway = Gateway("127.0.0.1", 0, max_body=1000, connections=server.MIN_CONNECTIONS)
        async with gateway.listening():
            port = int(gateway.url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await answer(reader)
            sent = []

            def send_then_make_room(connection: Any) -> None:
                if not sent:
                    sent.append(writer.write(request))
                make_room(connection)

            monkeypatch.setattr(server._Connection, "_make_room", send_then_make_room)
            others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            await answer(reader)
            assert sent
            for _, other in (*others, (reader, writer)):
                other.close()

    asyncio.run(work())


def test_the_port_stays_with_the_run_between_rollouts() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gateway = Gateway("127.0.0.1", port, max_body=1000)

    async def rollout() -> None:
        async with (
            gateway.episode("key", session_of(Engine())),
            httpx.AsyncClient(base_url=gateway.url) as client,
        ):
            client.headers["authorization"] = "Bearer key"
            await post(client, PATH, messages=[user("q")])

    asyncio.run(rollout())
    for option in (0, socket.SO_REUSEADDR):
        with socket.socket() as thief:
            if option:
                thief.setsockopt(socket.SOL_SOCKET, option, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    asyncio.run(rollout())


def test_a_port_that_is_taken_from_the_start_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        gateway = Gateway("127.0.0.1", other.getsockname()[1], max_body=1000)

        async def rollout() -> None:
            async with gateway.listening():
                pass

        with pytest.raises(RunError, match="--agent-port"):
            asyncio.run(rollout())


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"host": "evil.example:80"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_requests_of_web_pages_are_refused(headers: dict[str, str]) -> None:
    session = session_of(Engine())

    async def talk(client: httpx.AsyncClient) -> None:
        body = {"messages": [user("q")]}
        assert (await client.post(PATH, json=body, headers=headers)).status_code == 403
        assert (await client.get("/v1/models", headers=headers)).status_code == 403
        assert (await client.post(PATH, json=body)).status_code == 200

    run(session, talk)


def test_a_gateway_for_other_machines_takes_any_name_of_itself() -> None:
    check = OriginCheck("0.0.0.0", any_name=True)
    assert check.refusal({b"host": b"node7:8000"}) is None
    own = {b"host": b"node7:8000", b"origin": b"http://node7:8000"}
    assert check.refusal(own) is None
    assert "cross-site" in str(check.refusal({**own, b"origin": b"http://evil.example"}))
