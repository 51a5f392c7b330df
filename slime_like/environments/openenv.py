"""Environments of OpenEnv: a client of the WebSocket protocol of their servers, which needs neither
OpenEnv nor the environment's package here.

A server (``openenv serve``, a container, a Space) makes one environment for each connection, which
is one episode.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import ProxyHandler, build_opener

from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from slime_like.environments.interface import Step, TextEnvironment
from slime_like.rewards.task import extract_answer
from slime_like.text import clean, mask_url

_OPTIONS = ("action", "observation", "timeout_s", "wait_s")
_SCHEMA_S = 20.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_MAX_MESSAGE = 64 * 2**20  # bytes
_PASSING = (CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART, CloseCode.TRY_AGAIN_LATER)
_OPENER = build_opener(ProxyHandler({}))


def openenv_maker(url: str, options: Mapping[str, Any]) -> Callable[[], TextEnvironment]:
    """As `environment_maker`. Reads the schema of the server's actions.

    Args:
        url: Of the server, http://host:port.
        options: ``action``: the field of an action that takes the answer as text; default: the only
            required field, if it is text, else an answer is the whole action as a JSON object.
            ``observation``: the field to show; default: all of them, as JSON. ``timeout_s`` (60) of
            a step, ``wait_s`` (300) for a free place on the server.

    Raises:
        ValueError: There is no such server, field or option.
    """
    if unknown := sorted(set(options).difference(_OPTIONS)):
        raise ValueError(f"has no option {unknown[0]!r}; legal: {', '.join(_OPTIONS)}")
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{mask_url(url)} is no address of a server, http://host:port")
    schema = _schema(url)
    fields = _fields(schema["action"])
    field = options.get("action")
    if field is None and len(fields) == 1:
        field = next((name for name, kind in fields.items() if kind == "string"), None)
    if field is not None and field not in schema["action"].get("properties", {}):
        raise ValueError(f"an action has no field {field!r}; it has {', '.join(fields) or 'none'}")
    shown = options.get("observation")
    observations = schema.get("observation", {}).get("properties", {})
    if shown is not None and shown not in observations:
        raise ValueError(f"an observation has no field {shown!r}; it has {', '.join(observations)}")
    seconds = [options.get("timeout_s", 60), options.get("wait_s", 300)]
    if not all(isinstance(value, int | float) and value > 0 for value in seconds):
        raise ValueError("timeout_s and wait_s must be > 0")
    timeout_s, wait_s = map(float, seconds)
    legal = "" if field else f"Answer with a JSON object: {json.dumps(schema['action'])}"

    def make() -> OpenEnv:
        return OpenEnv(url, field, shown, legal=legal, timeout_s=timeout_s, wait_s=wait_s)

    return make


class OpenEnv:
    """An episode on a server, as a `TextEnvironment`.

    An answer that is no action leaves the environment unchanged, has reward 0, and is answered with
    what the server says. A step without a reward counts 0; an episode in which no action has one is
    left to the run's reward function, wherever it ends.
    """

    def __init__(
        self,
        url: str,
        field: str | None,
        shown: str | None,
        *,
        legal: str,
        timeout_s: float,
        wait_s: float,
    ) -> None:
        """See `openenv_maker`. legal: says what an answer must be, if it is not text."""
        self._url = url
        self._field = field
        self._shown = shown
        self._legal = legal
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._open = contextlib.ExitStack()
        self._socket: ClientConnection | None = None
        self._rewarded = False
        # of what has no reward of its own: None after an action, unless one had a reward
        self._no_reward: float | None = 0.0

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        """The prompt, the form of an answer and the first observation. ``options`` in the row's
        metadata are passed to the environment's reset. Raises RuntimeError if the server has no
        place, or fails."""
        options = row["metadata"].get("options") or {}
        first = self._first_answer({"type": "reset", "data": {"seed": seed, **options}})
        parts = (str(row["prompt"]), self._legal, self._text(first))
        return "\n\n".join(part for part in parts if part)

    def step(self, action: str) -> Step:
        """See `TextEnvironment`. Raises RuntimeError if the environment fails."""
        answer = extract_answer(action)
        data: object = {self._field: answer}
        if self._field is None:
            try:
                data = json.loads(answer)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict):
                return f"That is no JSON object. {self._legal}", self._no_reward, False
        found = self._ask({"type": "step", "data": data})
        if found.get("type") == "error" and _code(found) == "VALIDATION_ERROR":
            errors = [
                f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
                for each in found["data"].get("errors", [])
            ]
            return f"That is no action: {'; '.join(errors)}", self._no_reward, False
        self._check(found)
        reward = found["data"].get("reward")
        done = bool(found["data"].get("done"))
        self._rewarded = self._rewarded or reward is not None
        self._no_reward = 0.0 if self._rewarded else None
        return self._text(found), self._no_reward if reward is None else float(reward), done

    def close(self) -> None:
        self._open.close()

    def _first_answer(self, message: Mapping[str, object]) -> dict[str, Any]:
        """The answer to the first message, once the server has a place for the episode."""
        end = time.monotonic() + self._wait_s
        pause = _FIRST_PAUSE_S
        while True:
            is_open = False
            try:
                opening = connect(
                    _websocket_url(self._url),
                    open_timeout=self._timeout_s,
                    max_size=_MAX_MESSAGE,
                    proxy=None,
                )
                self._socket = self._open.enter_context(opening)
                is_open = True
                found = self._ask(message)
            except (OSError, ConnectionClosed, InvalidMessage, InvalidStatus) as error:
                found = {"type": "error", "data": {"message": f"{type(error).__name__}: {error}"}}
                busy = _is_passing(error, is_open=is_open)
            else:
                busy = found.get("type") == "error" and _code(found) == "CAPACITY_REACHED"
            if not busy or time.monotonic() > end:
                self._check(found)
                return found
            self.close()
            # drawn, because all episodes of a run begin together
            left_s = max(0.0, end - time.monotonic())
            time.sleep(min(pause * (0.5 + random.random()), left_s))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _ask(self, message: Mapping[str, object]) -> dict[str, Any]:
        assert self._socket is not None, "reset comes first"
        with contextlib.suppress(ConnectionClosed):  # a full server says so, and closes
            self._socket.send(json.dumps(message))
        try:
            found = json.loads(self._socket.recv(timeout=self._timeout_s))
        except TimeoutError:
            raise RuntimeError(f"{self._name} took longer than {self._timeout_s:g} s") from None
        except ValueError:
            raise RuntimeError(f"{self._name} answered no JSON") from None
        if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
            raise RuntimeError(f"{self._name} answered {clean(found, 100)}")
        return found

    def _check(self, found: Mapping[str, Any]) -> None:
        """Raise RuntimeError unless the answer is an observation."""
        if found.get("type") != "observation":
            code = f" ({_code(found)})" if _code(found) else ""
            reason = clean(found["data"].get("message", found), 300)
            raise RuntimeError(f"{self._name}: {reason}{code}")

    @property
    def _name(self) -> str:
        return f"the environment at {mask_url(self._url)}"

    def _text(self, found: Mapping[str, Any]) -> str:
        observation = found["data"].get("observation")
        if self._shown is not None and isinstance(observation, Mapping):
            observation = observation.get(self._shown, "")
        return observation if isinstance(observation, str) else json.dumps(observation)


def _code(found: Mapping[str, Any]) -> str:
    return str(found["data"].get("code") or "")


def _is_passing(error: Exception, *, is_open: bool) -> bool:
    """Whether a server, or the proxy before it, is busy or starting. One that ends an open
    connection without an answer is not: the environment has crashed."""
    if is_open:
        closed = error.rcvd if isinstance(error, ConnectionClosed) else None
        return closed is not None and closed.code in _PASSING
    if isinstance(error, InvalidStatus):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return True


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}[parts.scheme]
    return urlunsplit(parts._replace(scheme=scheme, path=f"{parts.path.rstrip('/')}/ws"))


def _schema(url: str) -> dict[str, Any]:
    """The JSON schemas of actions and observations. Raises ValueError."""
    try:
        with _OPENER.open(f"{url.rstrip('/')}/schema", timeout=_SCHEMA_S) as response:
            schema = json.loads(response.read(_MAX_MESSAGE))
        if isinstance(schema["action"], dict):
            found: dict[str, Any] = schema
            return found
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{mask_url(url)} is no OpenEnv server: /schema: {clean(error, 200)}"
        ) from None
    raise ValueError(f"{mask_url(url)} is no OpenEnv server: /schema has no actions")


def _fields(action: Mapping[str, Any]) -> dict[str, str | None]:
    """The required fields of an action, with their types."""
    properties = action.get("properties", {})
    return {name: properties.get(name, {}).get("type") for name in action.get("required", ())}
