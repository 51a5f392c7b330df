"""Requests to servers that grade: retries until the sample's deadline, and equal requests once.

Failed connections, 429 and 5xx are retried with exponential backoff; any other status, or a
response that is not JSON, is final.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import ssl
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from slime_like.text import clean, mask_url

MAX_BYTES = 2**20  # of a response
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_SHOWN = 200  # characters of a refusal
_SHORTEST_SECRET = 8  # characters; less is a stand-in such as EMPTY, perhaps a word of an answer
_MOST_RETRY_AFTER_S = 3600.0


@cache
def certificates() -> ssl.SSLContext:
    """Cached, because loading takes longer than a request."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A server that takes JSON by POST and answers with JSON.

    Args:
        url: Of the requests; credentials in it are not shown.
        timeout_s: Of a request with all its retries.
        secret: Sent as the bearer token; no message has it.
    """

    url: str
    timeout_s: float
    secret: str = field(default="", repr=False)

    async def post(self, body: Mapping[str, object], deadline: float | None = None) -> Any:
        """The server's answer, with "***" in place of the secret, because parts of it may get into
        messages. Raises RuntimeError with URL and status if the error is permanent, OutOfTime if
        there is no time to retry, or no whole answer in time. deadline: of the event loop's
        clock; None: after timeout_s."""
        if deadline is None:
            deadline = self.deadline()
        try:
            # around all of it: httpx's timeouts start anew with each part of a response
            async with asyncio.timeout_at(deadline):
                return await self._retried(body, deadline)
        except TimeoutError:
            reason = f"gave no whole answer in {self.timeout_s:g} s"
            raise OutOfTime(str(self.failure(reason)), deadline) from None

    def deadline(self) -> float:
        """Of a request that begins now."""
        return asyncio.get_running_loop().time() + self.timeout_s

    async def _retried(self, body: Mapping[str, object], deadline: float) -> Any:
        import httpx

        pause = FIRST_PAUSE_S
        tries = 0
        headers = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        # one connection per request: a killed worker leaves none behind; proxies in the environment
        # are ignored
        async with httpx.AsyncClient(
            timeout=None, trust_env=False, verify=certificates(), headers=headers
        ) as client:
            while True:
                try:
                    return await self._ask(client, body)
                except _Retry as reason:
                    tries += 1
                    wait = max(pause * (0.5 + random.random()), reason.wait_s)
                    next_try = asyncio.get_running_loop().time() + wait
                    if next_try > deadline:
                        said = str(self.failure(f"{reason}, {tries} times"))
                        raise OutOfTime(said, next_try) from reason
                    await asyncio.sleep(wait)
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    def failure(self, reason: str) -> RuntimeError:
        """An error with the URL and the reason, without the secret."""
        return RuntimeError(f"{mask_url(self.url)} {self._hidden(reason)}")

    def _hidden(self, text: str) -> str:
        """The text without the secret, also as JSON may escape it. Comes before any cut, so that no
        part of the secret is left."""
        if not self.secret:
            return text
        forms = (rf"(?:\\?{re.escape(each)}|\\u{ord(each):04x})" for each in self.secret)
        return re.sub("".join(forms), "***", text, flags=re.IGNORECASE)

    def _without_secret(self, value: Any) -> Any:
        """Copy of JSON data without the secret."""
        if isinstance(value, str):
            return self._hidden(value)
        if isinstance(value, dict):
            return {self._hidden(key): self._without_secret(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._without_secret(each) for each in value]
        return value

    async def _ask(self, client: Any, body: Mapping[str, object]) -> Any:
        import httpx

        data = b""
        try:
            async with client.stream("POST", self.url, json=body) as response:
                status = response.status_code
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_BYTES:
                        raise self.failure(f"answered more than {MAX_BYTES} bytes")
        except httpx.TransportError as error:
            raise _Retry(f"could not be reached ({type(error).__name__})") from error
        if status != 200:
            said = clean(self._hidden(data.decode(errors="replace")), _SHOWN)
            answered = f"answered {status}" + (f" ({said})" if said else "")
            if status == 429 or status >= 500:
                raise _Retry(answered, _retry_after(response.headers.get("retry-after")))
            raise self.failure(answered)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError) as error:
            said = clean(self._hidden(data.decode(errors="replace")), 80)
            raise self.failure(f"answered no JSON: {said}") from error
        return self._without_secret(answer) if len(self.secret) >= _SHORTEST_SECRET else answer


class OutOfTime(RuntimeError):
    """There is no answer until the deadline. until: the time of the event loop before which another
    request is useless."""

    def __init__(self, reason: str, until: float) -> None:
        super().__init__(reason)
        self.until = until


class _Retry(Exception):
    """A temporary error. wait_s: until when the server wants no other request."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def _retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header; 0 for a date, and for none."""
    if header is None or not header.strip().isdecimal():
        return 0.0
    return min(float(header), _MOST_RETRY_AFTER_S)


class AnsweredOnce:
    """Asks a server each question once: the latest `size` scores are kept, and equal questions at
    the same time are one request. Failures are not kept.

    A request is made for the sample that asks first, and ends with it, so that there are never more
    requests than samples. If it ran out of that sample's time, the next one that waits asks anew.

    Args:
        read: The score in an answer; raises RuntimeError if there is none.
    """

    def __init__(self, server: RewardServer, size: int, read: Callable[[Any], float]) -> None:
        self._server = server
        self._size = size
        self._read = read
        self._kept: OrderedDict[bytes, float] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[float]] = {}

    async def score(self, body: Mapping[str, object]) -> float:
        """The score in the answer. Raises RuntimeError as `RewardServer.post` and `read` do."""
        deadline = self._server.deadline()
        if not self._size:
            return await self._ask(body, deadline)
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        while (task := self._asked.get(key)) is not None:
            await asyncio.wait([task])  # which, unlike await, does not cancel it
            if not task.cancelled() and not _is_late(task.exception(), deadline):
                return task.result()
            if asyncio.get_running_loop().time() + FIRST_PAUSE_S > deadline:
                raise OutOfTime(str(self._server.failure("gave no answer in time")), deadline)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        task = asyncio.ensure_future(self._ask(body, deadline))
        task.add_done_callback(lambda done: self._keep(key, done))
        self._asked[key] = task
        return await task

    async def _ask(self, body: Mapping[str, object], deadline: float) -> float:
        return self._read(await self._server.post(body, deadline))

    def _keep(self, key: bytes, task: asyncio.Task[float]) -> None:
        del self._asked[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[key] = task.result()
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)


def _is_late(error: BaseException | None, deadline: float) -> bool:
    """Whether a request failed for lack of time that a sample with this deadline has."""
    return isinstance(error, OutOfTime) and error.until < deadline
