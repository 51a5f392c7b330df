"""Requests to servers that may be slow, wrong or dead: deadlines, and what is tried again.

| what happens | what is done |
|---|---|
| no connection, connection lost, no byte for too long, total time over | tried again, elsewhere where there is an elsewhere |
| status 5xx, 429 | tried again after a growing pause |
| other status | given up: the same request would be refused again |
| status 200 and no JSON | given up: never passed on |
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

# Seconds that a connection without work is kept. The server closes its side after 5, and a request that meets the closing is lost.
KEEPALIVE_S = 2.0
_SHOWN = 200  # characters of a body in an error message


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. connect: to be let in. read: between two pieces of an answer. total: for the whole answer, however slowly it drips."""

    connect_s: float = 10.0
    read_s: float = 600.0
    total_s: float = 1800.0

    @property
    def httpx(self) -> httpx.Timeout:
        return httpx.Timeout(self.read_s, connect=self.connect_s, pool=None)


@dataclass(frozen=True, slots=True)
class Retries:
    """attempts: all of them, the first included. Pauses grow from first_pause_s by a factor of 2, with half of it drawn at random."""

    attempts: int = 6
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0

    def pause_s(self, failures: int) -> float:
        whole = min(self.longest_pause_s, self.first_pause_s * 2 ** (failures - 1))
        return whole * random.uniform(0.5, 1.0)


class RequestFailed(Exception):
    """A request that brought nothing usable. kind: a short word for counting. again: whether trying again may help."""

    def __init__(self, kind: str, message: str, *, again: bool, server_gone: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.again = again
        self.server_gone = server_gone


def async_client(connections: int) -> httpx.AsyncClient:
    """For one event loop. connections: that are kept; more may be open."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE_S
    )
    return httpx.AsyncClient(trust_env=False, limits=limits)


async def post_once(client: httpx.AsyncClient, url: str, body: Any, deadlines: Deadlines) -> Any:
    """The JSON of an answer with status 200. Raises RequestFailed."""
    try:
        async with asyncio.timeout(deadlines.total_s):
            response = await client.post(url, json=body, timeout=deadlines.httpx)
    except TimeoutError:
        raise RequestFailed(
            "total_timeout", f"{url}: no whole answer within {deadlines.total_s:g} s", again=True
        ) from None
    except httpx.HTTPError as error:
        raise failure_of(error, url, deadlines) from None
    return json_of(response)


def failure_of(error: httpx.HTTPError, url: str, deadlines: Deadlines) -> RequestFailed:
    """What httpx met, in our words."""
    if isinstance(error, httpx.ConnectTimeout):
        return RequestFailed(
            "connect_timeout",
            f"{url}: no connection within {deadlines.connect_s:g} s",
            again=True,
            server_gone=True,
        )
    if isinstance(error, httpx.ConnectError):
        return RequestFailed(
            "connect", f"{url}: no connection: {error}", again=True, server_gone=True
        )
    if isinstance(error, httpx.TimeoutException):
        return RequestFailed(
            "read_timeout", f"{url}: silent for {deadlines.read_s:g} s", again=True
        )
    return RequestFailed(
        "connection_lost",
        f"{url}: the connection was lost: {type(error).__name__}: {error}",
        again=True,
    )


def json_of(response: httpx.Response) -> Any:
    """Raises RequestFailed for a status other than 200 and for what is no JSON."""
    url, status = response.url, response.status_code
    if status != 200:
        again = status >= 500 or status == 429
        raise RequestFailed(
            f"status_{status}", f"{url}: status {status}: {response.text[:_SHOWN]}", again=again
        )
    try:
        return response.json()
    except ValueError:
        raise RequestFailed(
            "no_json", f"{url}: status 200 and no JSON: {response.text[:_SHOWN]!r}", again=False
        ) from None


async def with_retries(
    attempt: Callable[[int], Awaitable[Any]], retries: Retries, counts: Counter[str]
) -> Any:
    """`attempt(number)` until it succeeds. Raises the last RequestFailed. counts: of failures by kind, and of "retries"."""
    for number in range(1, retries.attempts + 1):
        try:
            return await attempt(number)
        except RequestFailed as failure:
            counts[failure.kind] += 1
            if not failure.again or number == retries.attempts:
                raise
            counts["retries"] += 1
            await asyncio.sleep(retries.pause_s(number))
    raise AssertionError("unreachable: the last attempt returns or raises")


class ControlClient:
    """Calls that steer a server, one at a time, from the training thread or the one that watches health."""

    def __init__(self, connect_s: float) -> None:
        self._client = httpx.Client(
            trust_env=False, limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S)
        )
        self._connect_s = connect_s

    def call(self, url: str, body: Any = None, *, timeout_s: float, method: str = "POST") -> Any:
        """JSON of the answer, or its text where it is none. Raises RequestFailed."""
        deadlines = Deadlines(min(self._connect_s, timeout_s), timeout_s, timeout_s)
        try:
            response = self._client.request(
                method, url, json=body if method == "POST" else None, timeout=deadlines.httpx
            )
        except httpx.HTTPError as error:
            raise failure_of(error, url, deadlines) from None
        if response.status_code not in (200, 202):
            text = response.text[:1000]
            raise RequestFailed(
                f"status_{response.status_code}",
                f"{url}: status {response.status_code}: {text}",
                again=False,
            )
        try:
            return response.json()
        except ValueError:
            return response.text

    def close(self) -> None:
        self._client.close()
