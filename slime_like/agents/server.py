"""The gateway server, which runs in the event loop of the episodes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_like.agents.app import make_app
from slime_like.agents.sessions import Session
from slime_like.agents.tasks import TaskQueue
from slime_like.errors import RunError
from slime_like.origin_check import OriginCheck, is_loopback

# connections, in addition to those that episodes may need; beyond, the oldest idle one is closed
CONNECTIONS = 512
SILENT_S = 10.0  # seconds until the first byte of a new connection
STOP_S = 5.0
OTHER_FILES = 256  # open files of the run, in addition to connections
MIN_CONNECTIONS = 16


class _Server(uvicorn.Server):
    """Leaves signal handling to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """Closes a new connection that sends nothing, because it counts towards the limit. At the
    limit, of the connections that wait for bytes of their client the oldest is closed, and one that
    has been answered only if all have, so that a client cannot block others with unused connections
    or incomplete requests, nor close theirs between two requests."""

    answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(
            SILENT_S, self.timeout_keep_alive_handler
        )
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        self.answered = self.answered or "answered" in self.scope["state"]
        super().on_response_complete()

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, _Connection) and c is not self]
        waiting = [c for c in others if c.waits_for_client()]
        if waiting:
            # under load the oldest may just have been sent a request, which it has not read
            oldest = min(waiting, key=lambda c: (c.has_unread_bytes(), c.answered, c.idle_since))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def waits_for_client(self) -> bool:
        """Between two requests, or within one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def has_unread_bytes(self) -> bool:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))


class Gateway:
    """Sessions by key, and their HTTP server. It listens only from the start of the first episode
    to the end of the last."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_body: int,
        connections: int = CONNECTIONS,
        tasks: TaskQueue | None = None,
    ) -> None:
        """
        Args:
            host: Address to listen on.
            port: 0: any free port.
            max_body: Maximum request size in bytes.
            connections: Maximum concurrent connections of all clients.
            tasks: Task queue for remote agent workers.
        """
        self._tasks = tasks
        self._connections = connections
        self.sessions: dict[str, Session] = {}
        self.url = ""  # set while it listens
        self._host = host
        self._port = port
        self._max_body = max_body
        self._episodes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[_Server] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        # keeps the port between rollouts, without listening
        self._holder: socket.socket | None = None

    @contextlib.asynccontextmanager
    async def episode(self, key: str, session: Session) -> AsyncIterator[None]:
        """Serve the session within the block; its requests have ended afterwards."""
        async with self.listening():
            self.sessions[key] = session
            try:
                yield
            finally:
                session.end()
                self.sessions.pop(key, None)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Run the server within the block."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # an earlier rollout was interrupted together with its loop
            self._loop = loop
            self._episodes = 0
            self._starting = None
            self._stopping = None
            self.sessions.clear()
        self._episodes += 1
        try:
            if self._starting is None:
                self._starting = loop.create_task(self._start(self._stopping))
            await asyncio.shield(self._starting)
            yield
        finally:
            self._episodes -= 1
            if not self._episodes and self._starting is not None:
                starting = self._starting
                self._starting = None
                self._stopping = loop.create_task(self._stop(starting))
                await asyncio.shield(self._stopping)

    async def _start(self, stopping: asyncio.Task[None] | None) -> _Server:
        """Start the server. stopping: the previous server, which occupies the port until it has
        stopped."""
        if stopping is not None:
            await asyncio.shield(stopping)
        bound = self._bind()
        if self._port and self._holder is None:
            self._holder = self._bind()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{bound.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(
                self.sessions,
                max_body=self._max_body,
                origin_check=OriginCheck(self._host, any_name=not is_loopback(self._host)),
                tasks=self._tasks,
            ),
            log_level="critical",
            access_log=False,
            lifespan="off",
            limit_concurrency=affordable(self._connections),
            http=_Connection,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(server.serve(sockets=[bound]))
        while not server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        return server

    def _bind(self) -> socket.socket:
        """A socket with the gateway's address. Raises RunError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        bound = socket.socket(family)
        try:
            if self._port:  # two sockets of this user may have the port, and of nobody else
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind((self._host, self._port))
        except OSError as error:
            bound.close()
            raise RunError(
                f"--agent-host {self._host} --agent-port {self._port}: {error}"
            ) from error
        return bound

    async def _stop(self, starting: asyncio.Task[_Server]) -> None:
        with contextlib.suppress(RunError, asyncio.CancelledError):
            server = await starting
            if self._tasks is not None:
                self._tasks.release()
            server.should_exit = server.force_exit = True
        serving = self._serving
        self._serving = None
        if serving is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(serving, STOP_S)
        self.url = ""


def affordable(connections: int) -> int:
    """The number of connections that the limit of open files allows, which is raised as far as it
    may be. Without a file for the next connection, the server could not even refuse it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if soft < needed or soft == resource.RLIM_INFINITY:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(MIN_CONNECTIONS, min(connections, soft - OTHER_FILES))
