"""The episode as an agent function sees it in a process of its own: over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from slime_like.agents.messages import BadRequest, ContextExceeded
from slime_like.agents.sessions import EngineAborted, SessionEnded, TooManyRequests
from slime_like.agents.task import Task

_OPENER = build_opener(ProxyHandler({}))  # the gateway is reached without proxies
_ERRORS: Mapping[int, type[Exception]] = {
    400: BadRequest,
    410: SessionEnded,
    429: TooManyRequests,
    503: EngineAborted,
}


class RemoteTask(Task):
    """A `Task` without a session: what it asks for goes to the gateway, with the same errors."""

    async def chat(
        self, messages: Sequence[Mapping[str, object]], **parameters: object
    ) -> dict[str, Any]:
        """See `Task.chat`."""
        self._no_stream(parameters)
        body = {"model": self.model, "messages": list(messages), **parameters}
        answer: dict[str, Any] = await asyncio.to_thread(self._post, "chat/completions", body)
        return answer

    def reward(self, value: float, answer: int = -1) -> None:
        """See `Task.reward`."""
        self._post("rewards", {"reward": value, "answer": answer})

    def _post(self, path: str, body: Mapping[str, object]) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = Request(f"{self.base_url}/{path}", json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request) as response:  # the episode has a time limit
                return json.loads(response.read())
        except HTTPError as error:
            with error:
                reason = json.loads(error.read())["error"]
            kind = _ERRORS.get(error.code, RuntimeError)
            if reason.get("code") == "context_length_exceeded":
                kind = ContextExceeded
            raise kind(reason["message"]) from None
