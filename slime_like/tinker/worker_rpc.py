"""The API process's side of the connection to the workers: a single connection on a loopback port,
opened by rank 0 of the workers with a token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_like.tinker import codec
from slime_like.tinker.errors import Failed, Refused

log = logging.getLogger(__name__)
LINK_FILE = "link.json"
HELLO_S = 10.0
MAX_HELLO = 2**24


class WorkerLink:
    """The API process's connection to rank 0 of the workers.

    facts: what the workers reported when they connected; {} before.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        on_connect: Callable[[codec.Message], None],
        on_loss: Callable[[str], None],
        on_other_settings: Callable[[], None],
        on_fault: Callable[[str], None] = log.error,
    ) -> None:
        """
        Args:
            fingerprint: Of the configuration; workers with a different one are rejected.
            on_connect: Called with the first message of new workers.
            on_loss: Called with the reason when the workers are gone.
            on_other_settings: Called when workers with a different configuration connect.
            on_fault: Called with a message if the connection fails by an internal error.
        """
        self.facts: dict[str, object] = {}
        self._folder = folder
        self._token = secrets.token_hex(32)
        self._fingerprint = fingerprint
        self._on_connect = on_connect
        self._on_loss = on_loss
        self._on_other_settings = on_other_settings
        self._on_fault = on_fault
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.connected = False
        self._waiting: tuple[str, asyncio.Future[codec.Message]] | None = None
        self._server: asyncio.Server | None = None
        self._late: codec.Message | None = None  # response of the workers' last command
        self.said_goodbye = False

    async def start(self) -> None:
        """Listen, and write port and token to a file that only this user can read."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        path = self._folder / LINK_FILE
        temporary = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            link = {"port": port, "token": self._token, "pid": os.getpid()}
            json.dump({**link, "fingerprint": self._fingerprint}, file)
        temporary.replace(path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._streams is not None:
            self._streams[1].close()

    async def call(self, id: str, command: codec.Message) -> object:
        """Execute a command on the workers; returns their response.

        Raises:
            Refused, Failed: As reported by the workers.
            Failed: There are no workers, or they are lost before they respond.
        """
        if not self.connected:
            raise Failed("the workers have ended", common=True)
        # executed for an earlier API process that exited before the response arrived
        if self._late is not None and self._late["id"] == id:
            message = self._late
            self._late = None
            return value_of(message)
        assert self._streams is not None
        response: asyncio.Future[codec.Message] = asyncio.get_running_loop().create_future()
        self._waiting = (id, response)
        try:
            writer = self._streams[1]
            writer.write(codec.framed(codec.encode({"id": id, **command})))
            with contextlib.suppress(ConnectionError):  # reported by the reader
                await writer.drain()
            return value_of(await response)
        finally:
            self._waiting = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await self._read(reader, MAX_HELLO)
        except (TimeoutError, ValueError, asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        token = hello.get("token") if isinstance(hello, dict) else None
        trusted = isinstance(token, str) and hmac.compare_digest(token, self._token)
        if not trusted or self._streams is not None:
            writer.close()
            return
        if hello.get("fingerprint") != self._fingerprint:
            writer.close()
            self._on_other_settings()
            return
        self.facts = hello["facts"]
        self._streams = (reader, writer)
        self._late = hello["last"]
        reason = "the connection was closed"
        try:
            self.connected = True
            self._on_connect(hello)
            while True:
                message = await self._read(reader)
                if "reason" in message:
                    self.said_goodbye = message["goodbye"]
                    reason = message["reason"]
                    break
                if self._waiting is not None and self._waiting[0] == message["id"]:
                    self._respond(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            log.exception("the connection to the workers")
            self._on_fault(f"the connection to the workers failed ({error!r})")
        finally:
            self.connected = False
            self._streams = None
            writer.close()
            error_text = f"the workers have ended ({reason})"
            failed = {"ok": False, "category": "server", "common": True}
            self._respond({**failed, "error": error_text})
            self._on_loss(reason)

    def _respond(self, message: codec.Message) -> None:
        """Resolve the pending call, if there is one."""
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_result(message)

    async def _read(self, reader: asyncio.StreamReader, limit: int | None = None) -> Any:
        size = codec.frame_size(await reader.readexactly(codec.HEAD))
        if limit is not None and size > limit:
            raise ValueError("too large")
        return codec.decode(await reader.readexactly(size))


def value_of(message: codec.Message) -> object:
    """Result of a command from the workers' response. Raises Refused or Failed."""
    if message["ok"]:
        return message["value"]
    if message["category"] == "user":
        raise Refused(message["error"])
    broken, common = bool(message.get("broken")), bool(message.get("common"))
    raise Failed(message["error"], broken=broken, common=common)
