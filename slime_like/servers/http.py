"""HTTP requests to servers that may be slow, faulty or dead: deadlines and retries.

- no connection, connection lost, read timeout, total timeout: retry, on another server if possible
- status 5xx, 429: retry with exponential backoff
- other status: fail, because the same request would be rejected again
- status 200 with invalid or oversized JSON: fail

Compression is neither requested nor accepted, so that size limits hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TypeVar

import httpx
from pydantic_core import from_json

from slime_like.text import clean, shown

T = TypeVar("T")

# Seconds that an idle connection is kept. Servers close it after 5 s, and a request sent at that
# moment would be lost.
KEEPALIVE_S = 2.0
ANSWER_BYTES = 64 * 2**20  # default size limit of a response
_REFUSAL_BYTES = 64 * 2**10  # size limit of an error body, which is only shown
_CANCEL_S = 5.0  # for the control client's thread to cancel a late call


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts."""

    connect_s: float = 10.0
    read_s: float = 600.0  # between two chunks of a response
    total_s: float = 1800.0  # for the complete response

    @property
    def httpx(self) -> httpx.Timeout:
        return httpx.Timeout(self.read_s, connect=self.connect_s, pool=None)


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy. Pauses double from first_pause_s, with 50% jitter."""

    attempts: int = 6  # including the first
    first_pause_s: float = 0.25
    longest_pause_s: float = 10.0

    def pause_s(self, failures: int) -> float:
        pause = min(self.longest_pause_s, self.first_pause_s * 2 ** (failures - 1))
        return pause * random.uniform(0.5, 1.0)


class RequestFailed(Exception):
    """A failed request.

    Args:
        kind: A short name for counting.
        retryable: Whether a retry may succeed.
    """

    def __init__(
        self, kind: str, message: str, *, retryable: bool, server_gone: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.server_gone = server_gone


def async_client(connections: int) -> httpx.AsyncClient:
    """An HTTP client for one event loop. connections: keep-alive connections; more may be open.

    Cookies are not kept: they belong to a host, and would go to all other servers there.
    """
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=connections, keepalive_expiry=KEEPALIVE_S
    )
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(trust_env=False, limits=limits, cookies=no_cookies)


async def post_once(
    client: httpx.AsyncClient,
    url: str,
    body: object,
    deadlines: Deadlines,
    max_bytes: int = ANSWER_BYTES,
) -> bytes:
    """POST once; returns the body of a 200 response, at most `max_bytes`. Raises RequestFailed."""
    request = _request(client, "POST", url, body, deadlines)
    return await _exchange(client, request, deadlines, max_bytes, (200,))


def _request(
    client: httpx.AsyncClient, method: str, url: str, body: object, deadlines: Deadlines
) -> httpx.Request:
    """Build a request. Raises RequestFailed for an invalid URL."""
    try:
        return client.build_request(
            method,
            url,
            json=body if method == "POST" else None,
            timeout=deadlines.httpx,
            headers={"Accept-Encoding": "identity"},
        )
    except httpx.InvalidURL as error:
        raise RequestFailed("no_url", f"{shown(url)}: {error}", retryable=False) from None


async def _exchange(
    client: httpx.AsyncClient,
    request: httpx.Request,
    deadlines: Deadlines,
    max_bytes: int,
    statuses: tuple[int, ...],
) -> bytes:
    """The response body, within the total deadline. Raises RequestFailed."""
    url = str(request.url)
    try:
        async with asyncio.timeout(deadlines.total_s):
            response = await client.send(request, stream=True)
            try:
                return await _body(response, url, max_bytes, statuses)
            finally:
                await response.aclose()
    except TimeoutError:
        raise RequestFailed(
            "total_timeout",
            f"{url}: no whole answer within {deadlines.total_s:g} s",
            retryable=True,
        ) from None
    except httpx.HTTPError as error:
        raise failure_of(error, url, deadlines) from None


async def _body(
    response: httpx.Response, url: str, max_bytes: int, statuses: tuple[int, ...]
) -> bytes:
    """Read the body. Raises RequestFailed for an unexpected status, a compressed body, or more than
    `max_bytes`."""
    legal = response.status_code in statuses
    encoding = response.headers.get("Content-Encoding")
    if legal and encoding not in (None, "identity"):
        raise RequestFailed("encoded", f"{url}: encoded as {shown(encoding, 40)}", retryable=False)
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if legal and size > max_bytes:
            raise RequestFailed("too_large", f"{url}: more than {max_bytes} bytes", retryable=False)
        if not legal and size > _REFUSAL_BYTES:
            break
    if not legal:
        status = response.status_code
        message = clean(b"".join(parts).decode("utf-8", "replace"), 1000)
        raise RequestFailed(
            f"status_{status}", f"{url}: status {status}: {message}", retryable=is_transient(status)
        )
    return b"".join(parts)


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status >= 500 or status == 429


def failure_of(error: httpx.HTTPError, url: str, deadlines: Deadlines) -> RequestFailed:
    """Translate an httpx error."""
    reason = clean(str(error))
    if isinstance(error, httpx.ConnectTimeout):
        message = f"{url}: no connection within {deadlines.connect_s:g} s"
        return RequestFailed("connect_timeout", message, retryable=True, server_gone=True)
    if isinstance(error, httpx.ConnectError):
        message = f"{url}: no connection: {reason}"
        return RequestFailed("connect", message, retryable=True, server_gone=True)
    if isinstance(error, httpx.TimeoutException):
        message = f"{url}: silent for {deadlines.read_s:g} s"
        return RequestFailed("read_timeout", message, retryable=True)
    message = f"{url}: the connection was lost: {type(error).__name__}: {reason}"
    return RequestFailed("connection_lost", message, retryable=True)


async def with_retries(
    attempt: Callable[[int], Awaitable[T]], retries: Retries, counts: Counter[str]
) -> T:
    """Call `attempt(number)` until it succeeds. Raises the last RequestFailed. counts: incremented
    for each failure kind and for "retries"."""
    for number in range(1, retries.attempts + 1):
        try:
            return await attempt(number)
        except RequestFailed as failure:
            counts[failure.kind] += 1
            if not failure.retryable or number == retries.attempts:
                raise
            counts["retries"] += 1
            await asyncio.sleep(retries.pause_s(number))
    raise AssertionError("unreachable: the last attempt returns or raises")


class ControlClient:
    """Control calls to servers, from any thread. They run in an event loop in a separate thread, so
    that a deadline cancels a call at any point: connecting, in the headers or in the body."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        # a connection for each call: a surplus response would be read as that of the next call
        self._client = async_client(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="server-control", daemon=True
        )
        self._thread.start()

    def call(
        self,
        url: str,
        body: object = None,
        *,
        timeout_s: float,
        method: str = "POST",
        max_bytes: int = ANSWER_BYTES,
        reads_object: bool = True,
    ) -> dict[str, object]:
        """Send a request; returns the response object, {} for an empty body or null.

        Args:
            timeout_s: In all.
            reads_object: Otherwise the status tells all, and {} is returned.

        Raises:
            RequestFailed: Also for a response with `"success": false`.
        """
        answer = self._bytes(url, body, timeout_s, method, max_bytes)
        if not reads_object:
            return {}
        try:
            value = from_json(answer) if answer.strip() else None
        except ValueError as error:
            message = f"{url}: status 200 and invalid JSON: {error}"
            raise RequestFailed("no_json", message, retryable=False) from None
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RequestFailed("no_object", f"{url}: no object: {shown(value)}", retryable=False)
        if value.get("success", True) is not True:
            message = clean(str(value.get("message", value)))
            raise RequestFailed("no_success", f"{url}: the call failed: {message}", retryable=False)
        return value

    def is_reachable(self, url: str, timeout_s: float) -> bool:
        """Whether a GET returns status 200."""
        try:
            self._bytes(url, None, timeout_s, "GET", ANSWER_BYTES)
        except RequestFailed:
            return False
        return True

    def _bytes(
        self, url: str, body: object, timeout_s: float, method: str, max_bytes: int
    ) -> bytes:
        deadlines = Deadlines(min(self._connect_s, timeout_s), timeout_s, timeout_s)
        # outside the loop, because serialising a large body would block it
        request = _request(self._client, method, url, body, deadlines)
        exchange = _exchange(self._client, request, deadlines, max_bytes, (200, 202))
        closed = RequestFailed("closed", f"{url}: the run ends", retryable=False)
        try:
            future = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        except RuntimeError:  # the loop is closed
            exchange.close()
            raise closed from None
        try:
            return future.result(timeout_s + _CANCEL_S)
        except (TimeoutError, CancelledError):  # the loop was closed during the call
            future.cancel()
            raise closed from None

    def close(self) -> None:
        """Close; calls in flight fail. Idempotent."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(_CANCEL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_S)
        if not self._thread.is_alive():
            self._loop.close()


CONTROL_S = 30.0  # time limit of calls without weights
