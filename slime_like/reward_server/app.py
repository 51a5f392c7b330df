"""The HTTP routes of `slime-like reward-server` (`__main__.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from slime_like.errors import RunError
from slime_like.reward_server.model import BadText, Batches, NoScore, RewardModel

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it


def make_app(model: RewardModel, tokens: int) -> FastAPI:
    """The FastAPI application."""
    batches: list[Batches] = []  # made in the server's event loop

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batches.append(Batches(model, tokens))
        running = asyncio.create_task(batches[0].run())
        yield
        running.cancel()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def tokenize(request: Request) -> Any:
        body = await _body(request)
        special = body.get("add_special_tokens", True) is True
        ids = model.tokenizer(str(body.get("prompt", "")), add_special_tokens=special)["input_ids"]
        return {"tokens": ids, "count": len(ids)}

    async def classify(request: Request) -> Any:
        given = (await _body(request)).get("input_ids")
        rows = given if isinstance(given, list) and given and isinstance(given[0], list) else None
        texts = [model.check(each) for each in ([given] if rows is None else rows)]
        scoring = asyncio.gather(*map(batches[0].score, texts))
        leaving = asyncio.create_task(_left(request))
        try:
            first: list[asyncio.Future[Any]] = [scoring, leaving]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():  # nobody waits for it
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            answers = [{"embedding": [score]} for score in scoring.result()]
        finally:
            scoring.cancel()
            leaving.cancel()
        return answers[0] if rows is None else answers

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        final = isinstance(error, BadText | NoScore)
        return JSONResponse({"error": str(error)}, 400 if final else 500)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_api_route("/health", health)
    app.add_api_route("/tokenize", tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/classify", classify, methods=["POST"], response_model=None)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(BadText, refuse)
    app.add_exception_handler(RunError, refuse)
    return app


async def _left(request: Request) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise BadText("the body is no JSON") from None
    if not isinstance(body, dict):
        raise BadText("the body is no JSON object")
    return body
