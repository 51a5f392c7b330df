"""Descriptions of the gateway's routes, from which scripts/generate_http_api.py generates
docs/http_api.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.agents import anthropic_api, openai_api, responses_api

_TASK = {"reward": {"type": "number or null"}, "error": {"type": "string or null"}}
_ROUTES: Mapping[str, tuple[str, Any]] = {
    "chat/completions": ("OpenAI's chat completions, streamed or whole.", openai_api),
    "messages": ("Anthropic's messages, streamed or whole.", anthropic_api),
    "messages/count_tokens": (
        "Tokens of a prompt in Anthropic's form: `input_tokens`.",
        anthropic_api,
    ),
    "responses": ("OpenAI's responses, streamed or whole.", responses_api),
    "rewards": (
        "Adds to the reward of an answer of the episode (`answer`: its place, -1 the last).",
        {"reward": {"type": "number"}, "answer": {"type": "integer", "default": -1}},
    ),
    "models": ("The one model, `policy`; every other name is answered by it, too.", {}),
    "/tasks/claim": (
        "With a worker's key: the next task, with the episode's own key; 204 where none comes "
        "within `wait_s`.",
        {"wait_s": {"type": "number", "default": 0}},
    ),
    "/tasks/heartbeat": ("With the episode's key, at least each `--agent-heartbeat-s`.", {}),
    "/tasks/finish": (
        "With the episode's key: the end, with a reward, or why there is none.",
        _TASK,
    ),
}


def described(path: str) -> dict[str, Any]:
    """FastAPI's description and openapi_extra of a route of the gateway."""
    description, body = _ROUTES[path]
    fields = body if isinstance(body, dict) else _fields(body.KNOWN, body.NEUTRAL)
    schema = {"type": "object", "properties": fields}
    content = {"application/json": {"schema": schema}}
    return {"description": description, "openapi_extra": {"requestBody": {"content": content}}}


def _fields(known: set[str], neutral: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """Parameters that accept any value of their API, and those that accept only a few."""
    legal = {name: {"enum": list(values)} for name, values in sorted(neutral.items())}
    return {name: {} for name in sorted(known)} | legal
