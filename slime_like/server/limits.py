"""Before any route: the key, the size of the body, and how long it may take to come. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

OWNER = "slime_like.owner"  # entry of the scope
OPEN = ("/api/v1/healthz",)
BODY_S = 60.0
HEADERS_S = 20.0
MAX_HEADERS = 100

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """keys: those that are let in; None lets everybody in. Bodies are read whole, up to `max_body` bytes."""

    def __init__(self, app: App, *, keys: Sequence[str] | None, max_body: int) -> None:
        self.app = app
        self.max_body = max_body
        self._owners = None if keys is None else {hashlib.sha256(key.encode()).digest(): owner_name(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        owner = self._owner(headers.get(b"x-api-key", b""))
        if owner is None and scope["path"] not in OPEN:
            return await refuse(send, 401, "the key in X-API-Key is missing or unknown (see --api-key-file)")
        if len(scope["headers"]) > MAX_HEADERS:
            return await refuse(send, 431, f"more than {MAX_HEADERS} headers")
        if b"content-encoding" in headers:
            return await refuse(send, 415, "Content-Encoding is not offered here; send the body as it is")
        told = headers.get(b"content-length", b"0")
        if not told.isdigit() or len(told) > 18 or int(told) > self.max_body:
            return await refuse(send, 413, f"the body is larger than {self.max_body} bytes (--max-body-mb)")
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._body(receive)
        except TimeoutError:
            return await refuse(send, 408, f"the body did not come within {BODY_S:g} s")
        if body is None:
            return await refuse(send, 413, f"the body is larger than {self.max_body} bytes (--max-body-mb)")
        scope[OWNER] = owner or ""
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> MutableMapping[str, Any]:
            return given.pop() if given else await receive()

        await self.app(scope, again, send)

    def _owner(self, key: bytes) -> str | None:
        """None for a key that is not let in. Every key is compared, in the same time."""
        if self._owners is None:
            return "local"
        digest, found = hashlib.sha256(key).digest(), None
        for known, owner in self._owners.items():
            if hmac.compare_digest(known, digest):
                found = owner
        return found

    async def _body(self, receive: Receive) -> bytes | None:
        """None when it is too large."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""  # the client has gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.max_body:
                return None
            if not message.get("more_body"):
                return b"".join(parts)


def owner_name(key: str) -> str:
    """Tells one key's sessions from another's, without the key."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]


async def refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps({"detail": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class PatientProtocol(H11Protocol):
    """uvicorn's, which waits for headers without an end: a connection that has not sent a request after a while is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEADERS_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
