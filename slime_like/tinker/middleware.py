"""ASGI middleware before all routes: API key, origin, and limits of headers and body."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from collections.abc import Awaitable, Callable, MutableMapping

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_like.origin_check import OriginCheck
from slime_like.tinker.access import KeyRing
from slime_like.tinker.errors import HttpError

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
        origin_check: OriginCheck,
        operators: KeyRing | None = None,
    ) -> None:
        """
        Args:
            keys: Accepted API keys; None accepts every client that `origin_check` accepts.
            max_body: Maximum size of a body in bytes; bodies are read in full.
            operators: Keys that may list and end the sessions of all keys; every client may if
                neither kind of keys is given.
        """
        self.app = app
        self.max_body = max_body
        self._keys = keys
        self._operators = operators
        self._origin_check = origin_check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        try:
            body = await self._accept(scope, receive)
        except HttpError as error:
            return await send_error(send, error.status, str(error))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> MutableMapping[str, object]:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    async def _accept(self, scope: Scope, receive: Receive) -> bytes:
        """Check a request and read its body, decompressed. Records the owner in `scope`. Raises
        HttpError."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        is_open = scope["path"] in OPEN or scope["path"].startswith(DOWNLOADS)
        if self._keys is None and (reason := self._origin_check.refusal(headers)) is not None:
            raise HttpError(403, reason)
        owner = self._owner(headers, scope)
        if owner is None and not is_open:
            raise HttpError(401, "X-API-Key is missing or unknown (see --api-key-file)")
        if len(scope["headers"]) > MAX_HEADERS:
            raise HttpError(431, f"more than {MAX_HEADERS} headers")
        encoding = headers.get(b"content-encoding")
        if encoding is not None and (encoding != ZSTD or not supports_zstd()):
            name = encoding.decode("latin1")
            raise HttpError(
                415, f"Content-Encoding {name!r} is not supported; send it uncompressed"
            )
        declared = headers.get(b"content-length", b"0")
        too_large = HttpError(413, f"the body exceeds {self.max_body} bytes (--max-body-mb)")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self.max_body:
            raise too_large
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._body(receive)
        except TimeoutError:
            raise HttpError(408, f"the body was not received within {BODY_S:g} s") from None
        if body is not None and encoding is not None:
            body = decompress(body, self.max_body)
        if body is None:
            raise too_large
        scope[OWNER] = owner or ""
        return body

    def _owner(self, headers: dict[bytes, bytes], scope: Scope) -> str | None:
        """Owner of the request's key; None if the key is rejected. Records in `scope` whether it is
        an operator's."""
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        key = headers.get(b"x-api-key") or bearer
        operator = None if self._operators is None else self._operators.owner(key)
        without_keys = self._keys is None and self._operators is None
        scope[IS_OPERATOR] = operator is not None or without_keys
        if self._keys is None:
            return "local"
        return self._keys.owner(key) or operator

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body; None if it is too large."""
        parts = []
        size = 0
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
def supports_zstd() -> bool:
    """Whether compressed bodies are supported: zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def decompress(body: bytes, limit: int) -> bytes | None:
    """Decompress a zstd body; None if the result exceeds `limit` bytes. Raises HttpError 400 for
    invalid data."""
    import zstandard

    try:
        size = zstandard.frame_content_size(body)
        if size < 0:
            raise HttpError(400, "the zstd body does not declare its size; compress it at once")
        if size > limit:
            return None
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        return bytes(decompressor.decompress(body, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise HttpError(400, f"the body is not valid zstd: {error}") from None


async def send_error(send: Send, status: int, detail: str) -> None:
    body = json.dumps({"detail": detail}).encode()
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
