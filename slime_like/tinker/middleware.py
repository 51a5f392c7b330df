"""ASGI middleware before all routes: API key, body size limit, and body timeout."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from collections.abc import Awaitable, Callable, MutableMapping

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_like.tinker.access import KeyRing, Visitors

OWNER = "slime_like.owner"  # keys in the ASGI scope
IS_OPERATOR = "slime_like.is_operator"
OPEN = ("/api/v1/healthz",)
DOWNLOADS = "/api/v1/downloads/"  # authenticated by the signature in the path
BODY_S = 60.0
HEADERS_S = 20.0
MAX_HEADERS = 100
ZSTD = b"zstd"
MAX_WINDOW = 2**27  # maximum window size of compressed bodies, in bytes

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """ASGI middleware that rejects requests before routing."""

    def __init__(
        self,
        app: App,
        *,
        keys: KeyRing | None,
        max_body: int,
        visitors: Visitors,
        operators: KeyRing | None = None,
    ) -> None:
        """
        Args:
            keys: Accepted API keys; None accepts every client that `visitors` accepts.
            max_body: Maximum size of a body in bytes; bodies are read in full.
            operators: Keys that may list and end the sessions of all keys; everyone may if neither
                kind of keys is given.
        """
        self.app = app
        self.max_body = max_body
        self._keys, self._operators, self._visitors = keys, operators, visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        is_open = scope["path"] in OPEN or scope["path"].startswith(DOWNLOADS)
        if self._keys is None and (why := self._visitors.refusal(headers)) is not None:
            return await refuse(send, 403, why)
        owner = self._owner(headers, scope)
        if owner is None and not is_open:
            return await refuse(
                send, 401, "the key in X-API-Key is missing or unknown (see --api-key-file)"
            )
        if len(scope["headers"]) > MAX_HEADERS:
            return await refuse(send, 431, f"more than {MAX_HEADERS} headers")
        encoding = headers.get(b"content-encoding")
        if encoding is not None and (encoding != ZSTD or not unpacks()):
            return await refuse(
                send,
                415,
                f"Content-Encoding {encoding.decode('latin1')!r} is not offered here; send the body as it is",
            )
        told = headers.get(b"content-length", b"0")
        if not told.isdigit() or len(told) > 18 or int(told) > self.max_body:
            return await refuse(
                send, 413, f"the body is larger than {self.max_body} bytes (--max-body-mb)"
            )
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._body(receive)
        except TimeoutError:
            return await refuse(send, 408, f"the body did not come within {BODY_S:g} s")
        if body is not None and encoding is not None:
            try:
                body = unpacked(body, self.max_body)
            except ValueError as error:
                return await refuse(send, 400, str(error))
        if body is None:
            return await refuse(
                send, 413, f"the body is larger than {self.max_body} bytes (--max-body-mb)"
            )
        scope[OWNER] = owner or ""
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> MutableMapping[str, object]:
            return given.pop() if given else await receive()

        await self.app(scope, again, send)

    def _owner(self, headers: dict[bytes, bytes], scope: Scope) -> str | None:
        """Owner of the request's key; None if the key is rejected. Records in `scope` whether it is
        an operator's."""
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(
            b"Bearer "
        )
        operator = None if self._operators is None else self._operators.owner(key)
        scope[IS_OPERATOR] = operator is not None or (
            self._keys is None and self._operators is None
        )
        if self._keys is None:
            return "local"
        return self._keys.owner(key) or operator

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body; None if it is too large."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""  # the client disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_body:
                return None
            if not message.get("more_body"):
                return b"".join(parts)


@functools.cache
def unpacks() -> bool:
    """Whether compressed bodies are supported: zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def unpacked(body: bytes, most: int) -> bytes | None:
    """Decompress a zstd body; None if the result exceeds `most` bytes. Raises ValueError for
    invalid data."""
    import zstandard

    try:
        size = zstandard.frame_content_size(body)
        if size < 0:
            raise ValueError("the zstd body does not declare its size; compress it in one piece")
        if size > most:
            return None
        found: bytes = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(
            body, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"the body is not zstd: {error}") from None
    return found


async def refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with a timeout for request headers: connections without a complete request
    are closed after a while."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
