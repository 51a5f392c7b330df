"""The client of OpenEnv's servers, against a stand-in of their protocol; tests/environments has the
package itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http import HTTPStatus
from threading import Thread
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from slime_like.environments.base import environment_maker
from slime_like.environments.openenv import OpenEnv
from slime_like.types import SampleStatus
from tests.unit.agents.test_server import Engine
from tests.unit.environments.test_base import played

ROW = {"prompt": "Guess.", "metadata": {"options": {"level": 2}}}
SCHEMA = {
    "action": {
        "properties": {"guess": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["guess"],
    },
    "observation": {"properties": {"hint": {"type": "string"}, "left": {"type": "integer"}}},
}


def observation(reward: float | None, done: bool, **fields: Any) -> dict[str, Any]:
    data = {"observation": fields, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    data = message["data"]
    if message["type"] == "reset":
        return observation(
            None, False, hint=f"seed {data['seed']} level {data.get('level')}", left=3
        )
    if not isinstance(data.get("guess"), int):
        return error("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["guess"], "msg": "must be an int"}])  # fmt: skip
    if data["guess"] == 13:
        return error("EXECUTION_ERROR", "division by zero")
    if data["guess"] == 7:
        return observation(1, True, hint="right", left=0)
    if data["guess"] == 0:
        return observation(None, True, hint="given up", left=0)
    return observation(None, False, hint="wrong", left=2)


@pytest.fixture
def places() -> list[int]:
    return [9]  # free places, of the server


@pytest.fixture
def refusals() -> list[int]:
    return []  # HTTP statuses of the next connections


@pytest.fixture
def url(places: list[int], refusals: list[int]) -> Iterator[str]:
    def handle(connection: ServerConnection) -> None:
        places[0] -= 1
        try:
            if places[0] < 0:
                connection.send(json.dumps(error("CAPACITY_REACHED", "no free place")))
                return
            for message in connection:
                connection.send(json.dumps(answer(json.loads(message))))
        finally:
            places[0] += 1

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws" and refusals:
            return connection.respond(HTTPStatus(refusals.pop(0)), "not now")
        if request.path == "/ws":
            return None
        body = json.dumps(SCHEMA).encode()
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(HTTPStatus.OK, "OK", headers, body)

    server: Server
    with serve(handle, "127.0.0.1", 0, process_request=schema) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def environment(url: str, options: str = "") -> OpenEnv:
    made = environment_maker(f"openenv:{url}{options}")()
    assert isinstance(made, OpenEnv)
    return made


def test_actions_are_json_objects(url: str) -> None:
    """Of a schema without a single text; what is none changes nothing, and says why."""
    made = environment(url)
    first = made.reset(seed=5, row=ROW)
    assert first.startswith("Guess.\n\nAnswer with a JSON object: ")
    assert first.endswith('\n\n{"hint": "seed 5 level 2", "left": 3}')
    text, reward, done = made.step("seven")
    assert str(text).startswith("That is no JSON object. Answer with") and (reward, done) == (
        0.0,
        False,
    )
    wrong = made.step('{"guess": "x"}')
    assert wrong == ("That is no action: guess: must be an int", 0.0, False)
    assert made.step('<answer>{"guess": 3}</answer>') == (
        '{"hint": "wrong", "left": 2}',
        None,
        False,
    )
    assert made.step('{"guess": 7}') == ('{"hint": "right", "left": 0}', 1.0, True)
    made.close()


def test_a_field_of_text_and_one_to_show(url: str) -> None:
    made = environment(url, "?action=note&observation=hint")
    assert made.reset(seed=1, row=ROW) == "Guess.\n\nseed 1 level 2"
    assert "That is no action" in str(made.step("hello")[0]), "the other field is missing"
    made.close()


def test_an_episode_without_a_reward_is_left_to_the_reward_function(url: str) -> None:
    made = environment(url)
    made.reset(seed=1, row=ROW)
    assert made.step('{"guess": 0}')[1:] == (None, True)
    made.close()


@pytest.mark.parametrize(
    ("guesses", "reward", "of_turns"),
    [
        (["3", "3"], None, [0, 0]),
        (["3", "none"], None, [0, 0]),  # what is no action is no reward either
        (["none", "none"], 0.0, [0, 0]),
        (["3", "7"], 0.0, [0, 1]),
    ],
)
def test_an_episode_that_ends_at_its_limit_has_a_reward_if_an_action_had_one(
    url: str, guesses: list[str], reward: float | None, of_turns: list[float]
) -> None:
    engine = Engine(*(f'{{"guess": {guess}}}' for guess in guesses))
    sample = played(environment_maker(f"openenv:{url}"), engine, by_turn=True, turns=2)
    assert sample.status == SampleStatus.COMPLETED and len(engine.written) == 2
    assert sample.reward == reward and sample.metadata["agent_answers"]["rewards"] == of_turns


def test_an_environment_that_fails_loses_the_episode(url: str) -> None:
    made = environment(url)
    made.reset(seed=1, row=ROW)
    with pytest.raises(RuntimeError, match=r"division by zero \(EXECUTION_ERROR\)"):
        made.step('{"guess": 13}')
    made.close()


def test_a_free_place_is_waited_for(url: str, places: list[int]) -> None:
    places[0] = 1
    first = environment(url)
    first.reset(seed=1, row=ROW)
    with pytest.raises(RuntimeError, match=r"no free place \(CAPACITY_REACHED\)"):
        environment(url, "?wait_s=0.3").reset(seed=1, row=ROW)
    waiting = Thread(target=first.close)
    second = environment(url, "?wait_s=60")
    waiting.start()
    assert second.reset(seed=1, row=ROW)
    waiting.join()
    second.close()


def test_a_server_that_is_busy_or_starts_is_waited_for(url: str, refusals: list[int]) -> None:
    """But not one that has no such environment."""
    refusals += [503, 429, 502]
    made = environment(url)
    assert made.reset(seed=1, row=ROW)
    made.close()
    refusals += [503] * 100
    with pytest.raises(RuntimeError, match="HTTP 503"):
        environment(url, "?wait_s=0.3").reset(seed=1, row=ROW)
    refusals[:] = [404]
    with pytest.raises(RuntimeError, match="HTTP 404"):
        environment(url).reset(seed=1, row=ROW)


def test_a_server_that_closes_connections_while_it_starts_is_waited_for() -> None:
    """Closed without an answer, then nobody there."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def close_one() -> None:
        listening.accept()[0].close()
        listening.close()

    closes = Thread(target=close_one)
    closes.start()
    made = OpenEnv(url, None, None, legal="", timeout_s=60, wait_s=1.0)
    with pytest.raises(RuntimeError, match="ConnectionRefusedError"):
        made.reset(seed=1, row=ROW)
    closes.join()


@pytest.mark.parametrize(
    ("code", "attempts", "message"),
    [(1011, 1, "1011"), (None, 1, "no close frame"), (1012, 3, ""), (1013, 3, "")],
)
def test_a_crash_in_reset_is_not_waited_for(code: int | None, attempts: int, message: str) -> None:
    """But a server that goes away or asks to come again is. The third connection is answered."""
    seen: list[str] = []

    def handle(connection: ServerConnection) -> None:
        seen.append(str(connection.recv()))
        if len(seen) == 3:
            connection.send(json.dumps(observation(None, False, hint="there")))
        elif code is None:
            connection.socket.shutdown(socket.SHUT_RDWR)  # as if the process had died
        else:
            connection.close(code)

    with serve(handle, "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        made = OpenEnv(url, None, None, legal="", timeout_s=60, wait_s=60)
        try:
            if message:
                with pytest.raises(RuntimeError, match=message):
                    made.reset(seed=1, row=ROW)
            else:
                assert "there" in made.reset(seed=1, row=ROW)
        finally:
            made.close()
            server.shutdown()
            thread.join()
    assert len(seen) == attempts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("?action=word", "an action has no field 'word'; it has guess"),
        ("?observation=x", "an observation has no field 'x'; it has hint, left"),
        ("?actoin=note", "has no option 'actoin'; legal: action, observation, timeout_s, wait_s"),
        ("?wait_s=0", "timeout_s and wait_s must be > 0"),
    ],
)
def test_what_the_server_does_not_have(url: str, options: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        environment_maker(f"openenv:{url}{options}")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "ftp://x"])
def test_no_server(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no OpenEnv server|is no address of a server"):
        environment_maker(f"openenv:{url}")
