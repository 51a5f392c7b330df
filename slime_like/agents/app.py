"""HTTP routes of the gateway. The API key identifies the session.

The key comes as `Authorization: Bearer`, as `X-Api-Key`, or in the path: `/session/KEY/v1/...`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from slime_like.agents.anthropic_api import messages_ask, messages_json, messages_stream
from slime_like.agents.credit import add_reward
from slime_like.agents.descriptions import described
from slime_like.agents.messages import BadRequest, ContextExceeded
from slime_like.agents.openai_api import chat_ask, chat_json, chat_stream
from slime_like.agents.responses_api import responses_ask, responses_json
from slime_like.agents.responses_stream import responses_stream
from slime_like.agents.sessions import (
    Ask,
    Choice,
    EngineGaveUp,
    Session,
    SessionEnded,
    TooManyRequests,
)
from slime_like.agents.tasks import WAIT_S, TaskQueue

if TYPE_CHECKING:
    from slime_like.agents.task import Task

MODEL = "policy"
BODY_S = 30.0
RETRY_S = 1
_STATUS: Mapping[type[Exception], tuple[int, str]] = {
    BadRequest: (400, "invalid_request_error"),
    ContextExceeded: (400, "invalid_request_error"),
    TooManyRequests: (429, "rate_limit_error"),
    EngineGaveUp: (503, "api_error"),
    SessionEnded: (410, "invalid_request_error"),
}
Body = Mapping[str, object]
Answer = Callable[[Request, Session, Body], Awaitable[Response]]
Respond = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request rejected before it reaches the session. status: HTTP status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def make_app(
    sessions: Mapping[str, Session], *, max_body: int, tasks: TaskQueue | None = None
) -> FastAPI:
    """The gateway.

    Args:
        sessions: Sessions of running episodes, by key.
        max_body: Maximum request size in bytes.
        tasks: Task queue for remote agent workers.
    """
    app = FastAPI(title="slime_like", docs_url=None, redoc_url=None, openapi_url=None)
    gate = _Gate(sessions, max_body)
    for path, answer in (
        ("chat/completions", _chat),
        ("messages", _messages),
        ("messages/count_tokens", _count),
        ("responses", _responses),
        ("rewards", _rewards),
    ):
        for prefix in ("/v1/", "/session/{key}/v1/"):
            app.add_api_route(
                prefix + path, gate.route(answer), methods=["POST"], **described(path)
            )
    for prefix in ("/v1/", "/session/{key}/v1/"):
        app.add_api_route(prefix + "models", gate.models, methods=["GET"], **described("models"))
    if tasks is not None:
        for path, respond in gate.of_tasks(tasks).items():
            app.add_api_route(path, respond, methods=["POST"], **described(path))
    return app


class _Gate:
    """Common checks of all routes: key, body size, JSON."""

    def __init__(self, sessions: Mapping[str, Session], max_body: int) -> None:
        self._sessions = sessions
        self._max_body = max_body

    def route(self, answer: Answer) -> Respond:
        async def of_session(request: Request) -> Response:
            session = self._session(request)
            with session.request():
                return await answer(request, session, await self._body(request))

        return self._guarded(of_session)

    def of_tasks(self, tasks: TaskQueue) -> dict[str, Respond]:
        """Routes for remote agent workers, by path. Claims are authenticated by the worker's key,
        the others by the episode's."""

        async def claim(request: Request) -> Response:
            if not tasks.knows(key_of(request)):
                raise Refused(401, "the key is no worker's")
            wait = (await self._body(request)).get("wait_s", 0)
            if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
                raise BadRequest(f"wait_s must be a number of at least 0 (given: {wait!r:.60})")
            task = await unless_gone(request, tasks.claim(min(wait, WAIT_S)))
            return Response(status_code=204) if task is None else as_json(as_told(task, request))

        async def heartbeat(request: Request) -> Response:
            self._session(request)
            tasks.heartbeat(key_of(request))
            return as_json({})

        async def finish(request: Request) -> Response:
            self._session(request)
            body = await self._body(request)
            tasks.finish(key_of(request), body.get("reward"), body.get("error"))
            return as_json({})

        def as_told(task: Task, request: Request) -> dict[str, object]:
            url = str(request.base_url).rstrip("/")
            fields = ("prompt", "label", "metadata", "evaluation", "seed", "api_key")
            found = {name: getattr(task, name) for name in fields}
            limits = {"heartbeat_s": tasks.heartbeat_s, "timeout_s": tasks.timeout_s}
            return {**found, **limits, "url": url, "base_url": f"{url}/v1"}

        found = {"claim": claim, "heartbeat": heartbeat, "finish": finish}
        return {f"/tasks/{name}": self._guarded(respond) for name, respond in found.items()}

    def _guarded(self, inner: Respond) -> Respond:
        async def respond(request: Request) -> Response:
            try:
                return await inner(request)
            except Refused as error:
                kind = "authentication_error" if error.status == 401 else "invalid_request_error"
                return failed(request, error.status, kind, str(error))
            except tuple(_STATUS) as error:
                status, kind = _STATUS[type(error)]
                return failed(request, status, kind, str(error))
            except ValueError as error:  # from the engine, for a request that it can never serve
                return failed(request, 400, "invalid_request_error", str(error)[:500])
            except Exception:  # internal or the engine's; other episodes continue
                logger.exception("the gateway failed at a request of an agent")
                session = self._sessions.get(key_of(request))
                if session is not None:
                    session.counts["internal_errors"] += 1
                return failed(request, 500, "api_error", "the gateway failed at this request")

        return respond

    async def models(self, request: Request) -> Response:
        try:
            self._session(request)
        except Refused as error:
            return failed(request, error.status, "authentication_error", str(error))
        data = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "slime_like"}]
        return as_json({"object": "list", "data": data})

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(key_of(request))
        if session is None:
            raise Refused(401, "the key is missing, or of no episode that is under way")
        return session

    async def _body(self, request: Request) -> Body:
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_body:
                        raise Refused(413, f"the body is larger than {self._max_body} bytes")
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_S:g} s") from None
        try:
            value = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be an object")
        return value


def key_of(request: Request) -> str:
    """The key in the path or the headers; "" if there is none."""
    key = request.path_params.get("key") or request.headers.get("x-api-key")
    authorization = request.headers.get("authorization", "")
    return str(key or authorization.removeprefix("Bearer ").strip())


async def answered(request: Request, session: Session, ask: Ask) -> list[Choice]:
    """The completions; generation is aborted if the client disconnects."""
    return await unless_gone(request, session.answer(ask))


async def unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """Result of the work. Raises SessionEnded if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise SessionEnded("the client has left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chat(request: Request, session: Session, body: Body) -> Response:
    ask = chat_ask(body, session.sampling)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    choices = await answered(request, session, ask)
    answer = chat_json(choices, session, name_of(body), logprobs=bool(body.get("logprobs")))
    if not body.get("stream"):
        return as_json(answer)
    return stream(chat_stream(answer, with_usage=bool(options.get("include_usage"))))


async def _messages(request: Request, session: Session, body: Body) -> Response:
    ask, errors = messages_ask(body, session.sampling)
    (choice,) = await answered(request, session, ask)
    session.counts["tool_errors"] += errors
    answer = messages_json(choice, name_of(body))
    return stream(messages_stream(answer)) if body.get("stream") else as_json(answer)


async def _count(request: Request, session: Session, body: Body) -> Response:
    ask, _ = messages_ask({"max_tokens": 1, **body}, session.sampling)
    return as_json({"input_tokens": session.prompt_length(ask)})


async def _responses(request: Request, session: Session, body: Body) -> Response:
    ask = responses_ask(body, session.sampling)
    (choice,) = await answered(request, session, ask)
    answer = responses_json(choice, name_of(body))
    return stream(responses_stream(answer)) if body.get("stream") else as_json(answer)


async def _rewards(request: Request, session: Session, body: Body) -> Response:
    """Not of any vendor: ``{"reward": number, "answer": place}`` adds to the reward of an answer."""
    add_reward(session, body.get("reward"), body.get("answer", -1))
    return as_json({})


def name_of(body: Body) -> str:
    """The model name in a request; every name refers to the policy."""
    return str(body.get("model") or MODEL)[:200]


def as_json(value: Mapping[str, object], status: int = 200) -> Response:
    """A JSON response in ASCII, because text may contain lone surrogates."""
    return Response(json.dumps(value), status_code=status, media_type="application/json")


def stream(events: Iterable[str]) -> Response:
    return StreamingResponse(iter(list(events)), media_type="text/event-stream")


def failed(request: Request, status: int, kind: str, words: str) -> Response:
    """An error response in the format of the API that was called."""
    error: dict[str, object] = {"type": kind, "message": words}
    if "/messages" in request.url.path:
        response = as_json({"type": "error", "error": error}, status)
    else:
        code = "context_length_exceeded" if words.startswith("context_length_exceeded") else None
        response = as_json({"error": {**error, "code": code, "param": None}}, status)
    if status == 429:
        response.headers["retry-after"] = str(RETRY_S)
    return response
