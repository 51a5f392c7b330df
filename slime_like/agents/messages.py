"""Canonical form of chat messages for all APIs, so that the history a client sends can be compared
with the responses it received."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

# role, content (text, "" if there is none), and optionally reasoning_content, tool_calls (like
# OpenAI's, with parsed arguments), tool_call_id, name
Message: TypeAlias = Mapping[str, Any]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")


class BadRequest(ValueError):
    """An invalid or unsupported request; the message is for the client."""


class ContextExceeded(BadRequest):
    """The conversation leaves no room for a completion."""


def canonical(message: object, index: int) -> dict[str, object]:
    """Convert a message of OpenAI's chat completions to the canonical form, which is used for
    comparisons.

    Args:
        message: As sent by the client.
        place: Its index, for errors.

    Returns:
        The message; keys without information are dropped.

    Raises:
        BadRequest: Names the message and the problem.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise BadRequest(f"{where} must be an object with a role, {', '.join(ROLES)}")
    result: dict[str, object] = {"role": message["role"], "content": _text(message, where)}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        if not isinstance(reasoning, str):
            raise BadRequest(f"{where}.reasoning_content must be text")
        result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise BadRequest(f"{where}.tool_calls must be a list")
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadRequest(f"{where}.{key} must be text")
            result[key] = message[key]
    return result


def _text(message: Mapping[str, object], where: str) -> str:
    """The content, with text parts concatenated."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where}.content must be text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"{where}.content: a part of type {kind!r} is not offered; text is")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        raise BadRequest(f"{where} must have a function with a name")
    return tool_call(str(call.get("id") or ""), function["name"], function.get("arguments"))


def tool_call(identity: str, name: str, arguments: object) -> dict[str, object]:
    """A call in canonical form. arguments: an object, or its JSON; other text is kept as text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": identity, "type": "function", "function": function}


def history_keys(messages: Sequence[Message], tools: object) -> Iterator[bytes]:
    """Digests of the tools with each prefix of the messages, from the shortest (empty) prefix
    on."""
    digest = hashlib.blake2b(_json(tools), digest_size=16).digest()
    yield digest
    for message in messages:
        digest = hashlib.blake2b(digest + _json(message), digest_size=16).digest()
        yield digest


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()
