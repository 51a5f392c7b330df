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
from starlette.requests import ClientDisconnect

from slime_like.agents.anthropic_api import messages_json, messages_stream, parse_messages_request
from slime_like.agents.descriptions import described
from slime_like.agents.messages import BadRequest, ContextExceeded
from slime_like.agents.openai_api import chat_json, chat_stream, parse_chat_request
from slime_like.agents.responses_api import (
    parse_responses_request,
    responses_json,
    responses_stream,
)
from slime_like.agents.sessions import (
    Choice,
    EngineAborted,
    ParsedRequest,
    Session,
    SessionEnded,
    TooManyRequests,
)
from slime_like.agents.tasks import WAIT_S, TaskQueue
from slime_like.origin_check import OriginCheck

if TYPE_CHECKING:
    from slime_like.agents.task import Task

MODEL = "policy"
BODY_S = 30.0
RETRY_S = 1
_STATUS: Mapping[type[Exception], tuple[int, str]] = {
    BadRequest: (400, "invalid_request_error"),
    ContextExceeded: (400, "invalid_request_error"),
    TooManyRequests: (429, "rate_limit_error"),
    EngineAborted: (503, "api_error"),
    SessionEnded: (410, "invalid_request_error"),
}
Body = Mapping[str, object]
Answer = Callable[[Request, Session, Body], Awaitable[Response]]
Respond = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
logger = logging.getLogger(__name__)


class RefusedRequest(Exception):
    """A request rejected before it reaches the session. status: HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(
    sessions: Mapping[str, Session],
    *,
    max_body: int,
    origin_check: OriginCheck,
    tasks: TaskQueue | None = None,
) -> FastAPI:
    """The gateway.

    Args:
        sessions: Sessions of running episodes, by key.
        max_body: Maximum request size in bytes.
        origin_check: Rejects requests of web pages.
        tasks: Task queue for remote agent workers.
    """
    app = FastAPI(title="slime_like", docs_url=None, redoc_url=None, openapi_url=None)
    router = _Router(sessions, max_body, origin_check)
    for path, answer in (
        ("chat/completions", _chat),
        ("messages", _messages),
        ("messages/count_tokens", _count),
        ("responses", _responses),
        ("rewards", _rewards),
    ):
        for prefix in ("/v1/", "/session/{key}/v1/"):
            app.add_api_route(
                prefix + path, router.route(answer), methods=["POST"], **described(path)
            )
    for prefix in ("/v1/", "/session/{key}/v1/"):
        app.add_api_route(prefix + "models", router.models, methods=["GET"], **described("models"))
    if tasks is not None:
        for path, respond in router.task_routes(tasks).items():
            app.add_api_route(path, respond, methods=["POST"], **described(path))
    return app


class _Router:
    """Common checks of all routes: key, body size, JSON."""

    def __init__(
        self, sessions: Mapping[str, Session], max_body: int, origin_check: OriginCheck
    ) -> None:
        self._sessions = sessions
        self._max_body = max_body
        self._origin_check = origin_check

    def route(self, answer: Answer) -> Respond:
        async def of_session(request: Request) -> Response:
            session = self._session(request)
            with session.request():
                return await answer(request, session, await self._body(request))

        return self._with_errors(of_session)

    def task_routes(self, tasks: TaskQueue) -> dict[str, Respond]:
        """Routes for remote agent workers, by path. Claims are authenticated by the worker's key,
        the others by the episode's."""

        async def claim(request: Request) -> Response:
            if not tasks.is_worker_key(api_key_of(request)):
                raise RefusedRequest(401, "the key is no worker's")
            wait = (await self._body(request)).get("wait_s", 0)
            if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
                raise BadRequest(f"wait_s must be a number of at least 0 (given: {wait!r:.60})")
            task = await until_disconnect(request, tasks.claim(min(wait, WAIT_S)))
            if task is None:
                return Response(status_code=204)
            return json_response(task_json(task, request))

        async def heartbeat(request: Request) -> Response:
            self._session(request)
            tasks.heartbeat(api_key_of(request))
            return json_response({})

        async def finish(request: Request) -> Response:
            self._session(request)
            body = await self._body(request)
            tasks.finish(api_key_of(request), body.get("reward"), body.get("error"))
            return json_response({})

        def task_json(task: Task, request: Request) -> dict[str, object]:
            url = str(request.base_url).rstrip("/")
            fields = ("prompt", "messages", "label", "metadata", "evaluation", "seed", "api_key")
            values = {name: getattr(task, name) for name in fields}
            limits = {"heartbeat_s": tasks.heartbeat_s, "timeout_s": tasks.timeout_s}
            return {**values, **limits, "url": url, "base_url": f"{url}/v1"}

        handlers = {"claim": claim, "heartbeat": heartbeat, "finish": finish}
        return {f"/tasks/{name}": self._with_errors(respond) for name, respond in handlers.items()}

    def _with_errors(self, inner: Respond) -> Respond:
        async def respond(request: Request) -> Response:
            try:
                self._check_origin(request)
                response = await inner(request)
                request.state.answered = True  # for the server's choice of connections
                return response
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except RefusedRequest as error:
                kind = "authentication_error" if error.status == 401 else "invalid_request_error"
                return error_response(request, error.status, kind, str(error))
            except tuple(_STATUS) as error:
                status, kind = _STATUS[type(error)]
                return error_response(request, status, kind, str(error))
            except ValueError as error:  # from the engine, for a request that it can never serve
                return error_response(request, 400, "invalid_request_error", str(error)[:500])
            except Exception:  # internal or the engine's; other episodes continue
                logger.exception("the gateway failed at a request of an agent")
                session = self._sessions.get(api_key_of(request))
                if session is not None:
                    session.counts["internal_errors"] += 1
                return error_response(request, 500, "api_error", "the gateway failed")

        return respond

    async def models(self, request: Request) -> Response:
        try:
            self._check_origin(request)
            self._session(request)
        except RefusedRequest as error:
            return error_response(request, error.status, "authentication_error", str(error))
        data = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "slime_like"}]
        return json_response({"object": "list", "data": data})

    def _check_origin(self, request: Request) -> None:
        """Raise Refused for the request of a web page."""
        if (reason := self._origin_check.refusal(dict(request.scope["headers"]))) is not None:
            raise RefusedRequest(403, reason)

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(api_key_of(request))
        if session is None:
            raise RefusedRequest(401, "the key is missing, or of no episode that is under way")
        return session

    async def _body(self, request: Request) -> Body:
        parts = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_body:
                        raise RefusedRequest(413, f"the body is larger than {self._max_body} bytes")
        except TimeoutError:
            raise RefusedRequest(408, f"the body did not come within {BODY_S:g} s") from None
        try:
            value = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be an object")
        return value


def api_key_of(request: Request) -> str:
    """The key in the path or the headers; "" if there is none."""
    key = request.path_params.get("key") or request.headers.get("x-api-key")
    authorization = request.headers.get("authorization", "")
    return str(key or authorization.removeprefix("Bearer ").strip())


async def complete(request: Request, session: Session, parsed: ParsedRequest) -> list[Choice]:
    """The completions; generation is aborted if the client disconnects."""
    return await until_disconnect(request, session.answer(parsed))


async def until_disconnect(request: Request, work: Coroutine[object, object, T]) -> T:
    """Result of the work. Raises SessionEnded if the client disconnects first."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise SessionEnded("the client has left")
        return task.result()
    finally:
        for each in (task, disconnect):
            each.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _chat(request: Request, session: Session, body: Body) -> Response:
    parsed = parse_chat_request(body, session.sampling)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object")
    choices = await complete(request, session, parsed)
    answer = chat_json(choices, session, model_name(body), logprobs=bool(body.get("logprobs")))
    if not body.get("stream"):
        return json_response(answer)
    return stream(chat_stream(answer, with_usage=bool(options.get("include_usage"))))


async def _messages(request: Request, session: Session, body: Body) -> Response:
    parsed, errors = parse_messages_request(body, session.sampling)
    (choice,) = await complete(request, session, parsed)
    session.counts["tool_errors"] += errors
    answer = messages_json(choice, model_name(body))
    return stream(messages_stream(answer)) if body.get("stream") else json_response(answer)


async def _count(request: Request, session: Session, body: Body) -> Response:
    parsed, _ = parse_messages_request({"max_tokens": 1, **body}, session.sampling)
    return json_response({"input_tokens": session.prompt_length(parsed)})


async def _responses(request: Request, session: Session, body: Body) -> Response:
    parsed = parse_responses_request(body, session.sampling)
    (choice,) = await complete(request, session, parsed)
    answer = responses_json(choice, model_name(body))
    return stream(responses_stream(answer)) if body.get("stream") else json_response(answer)


async def _rewards(request: Request, session: Session, body: Body) -> Response:
    """A route of our own: ``{"reward": number, "answer": index}`` adds to a turn's reward."""
    session.add_reward(body.get("reward"), body.get("answer", -1))
    return json_response({})


def model_name(body: Body) -> str:
    """The model name in a request; every name refers to the policy."""
    return str(body.get("model") or MODEL)[:200]


def json_response(value: Mapping[str, object], status: int = 200) -> Response:
    """A JSON response in ASCII, because text may contain lone surrogates."""
    return Response(json.dumps(value), status_code=status, media_type="application/json")


def stream(events: Iterable[str]) -> Response:
    return StreamingResponse(iter(list(events)), media_type="text/event-stream")


def error_response(request: Request, status: int, kind: str, message: str) -> Response:
    """An error response in the format of the API that was called."""
    error: dict[str, object] = {"type": kind, "message": message}
    if "/messages" in request.url.path:
        response = json_response({"type": "error", "error": error}, status)
    else:
        code = "context_length_exceeded" if message.startswith("context_length_exceeded") else None
        response = json_response({"error": {**error, "code": code, "param": None}}, status)
    if status == 429:
        response.headers["retry-after"] = str(RETRY_S)
    return response
