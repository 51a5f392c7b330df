"""Chat messages of all APIs in canonical form, so that the history a client sends can be compared
with the responses it received."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from slime_like.data import messages
from slime_like.data.messages import Message


class BadRequest(ValueError):
    """An invalid or unsupported request; the message is for the client."""


class ContextExceeded(BadRequest):
    """The conversation leaves no room for a completion."""


def canonical(message: object, index: int) -> dict[str, Any]:
    """The canonical form of a client's message, its index in the request.

    Raises:
        BadRequest: Names the message and the problem.
    """
    try:
        return messages.canonical(message)
    except messages.MessageProblem as problem:
        raise BadRequest(f"messages[{index}]: {problem}") from None


def history_keys(history: Sequence[Message], tools: object) -> Iterator[bytes]:
    """Digests of the tools with each prefix of the history, from the shortest (empty) prefix
    on."""
    digest = hashlib.blake2b(_json(tools), digest_size=16).digest()
    yield digest
    for message in history:
        digest = hashlib.blake2b(digest + _json(message), digest_size=16).digest()
        yield digest


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()
