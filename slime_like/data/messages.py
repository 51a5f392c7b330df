"""The canonical form of chat messages, for rows of data and for requests of agents: OpenAI's and
Hugging Face's spellings of one message become the same dict."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

# role, content (text, "" if there is none), and optionally reasoning_content, tool_calls (like
# OpenAI's, with parsed arguments), tool_call_id, name
Message: TypeAlias = Mapping[str, Any]
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
# keys of an image part under which its image may be; a part without one is a place for an image
# that is given beside the messages
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
# Stands for an image in the content of a canonical message: a code point that Unicode reserves for
# use within a program.
IMAGE_MARK = "\ufdd0"
_READ = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "function_call")


class MessageProblem(ValueError):
    """A message that is no message of a chat, or has what cannot be trained on."""


def canonical(
    message: object,
    *,
    roles: Collection[str] | None = ROLES,
    keep_others: bool = False,
    images: list[object] | None = None,
) -> dict[str, Any]:
    """The canonical form of a message.

    Args:
        message: OpenAI's (also its older ``function_call``), or Hugging Face's. Tool calls
            may be without ``function``. Arguments are an object or its JSON.
        roles: Legal roles; None: any text.
        keep_others: Keep keys that have no canonical form, for templates that know them.
        images: See `content_text`.

    Returns:
        The message; keys without information are left out.

    Raises:
        MessageProblem: Names the problem.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str):
        raise MessageProblem(f"must be an object with a role, {', '.join(roles or ROLES)}")
    if roles is not None and role not in roles:
        raise MessageProblem(f"must be an object with a role, {', '.join(roles)}, not {role!r}")
    result: dict[str, Any] = {
        "role": "tool" if role == "function" else role,
        "content": content_text(message.get("content"), images),
    }
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        if not isinstance(reasoning, str):
            raise MessageProblem("'reasoning_content' must be text")
        result["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [message["function_call"]]
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise MessageProblem("'tool_calls' must be a list")
        result["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise MessageProblem(f"{key!r} must be text")
            result[key] = message[key]
    if keep_others:
        others = {key: value for key, value in message.items() if key not in _READ}
        result |= {key: value for key, value in others.items() if value is not None}
    return result


def content_text(content: object, images: list[object] | None = None) -> str:
    """The content of a message, with its parts concatenated.

    Args:
        images: Gets the image of every image part, None for a part without one; the text has
            `IMAGE_MARK` in its place. None: image parts are refused.

    Raises:
        MessageProblem: Names the problem.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        kind = "an empty list" if content == [] else type(content).__name__
        raise MessageProblem(f"'content' must be a string or a list of parts, not {kind}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping):
            raise MessageProblem("every part of 'content' must be an object with a 'type'")
        if images is not None and part.get("type") in _IMAGE_PARTS:
            images.append(_image(part))
            texts.append(IMAGE_MARK)
            continue
        if part.get("type") not in _TEXT_PARTS:
            offered = "text is" if images is None else "text and images are"
            raise MessageProblem(
                f"a part of type {part.get('type')!r:.60} in 'content' is not offered; {offered}"
            )
        if not isinstance(part.get("text"), str):
            raise MessageProblem(
                "a part of 'content' of type 'text' must hold a string under 'text'"
            )
        texts.append(part["text"])
    return "".join(texts)


def _image(part: Mapping[str, Any]) -> object:
    """The image of a part; None if it is given beside the messages."""
    others = part.keys() - {"type", "detail", *_IMAGE_KEYS}
    if unknown := sorted(key for key in others if part[key] is not None):
        raise MessageProblem(f"{unknown[0]!r} of a part of type 'image' is not offered")
    given = [key for key in _IMAGE_KEYS if part.get(key) is not None]
    if len(given) > 1:
        raise MessageProblem("a part of type 'image' has more than one image")
    image = part[given[0]] if given else None
    if given == ["base64"] and isinstance(image, str) and not image.startswith("data:"):
        return f"data:image/;base64,{image}"  # the text alone would be a path
    return image


def _call(call: object, number: int) -> dict[str, Any]:
    function = call
    if isinstance(call, Mapping) and call.get("function") is not None:
        function = call["function"]
    if (
        not isinstance(call, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        raise MessageProblem(f"tool_calls[{number}] must have a function with a name")
    return tool_call(str(call.get("id") or ""), function["name"], function.get("arguments"))


def tool_call(identity: str, name: str, arguments: object) -> dict[str, Any]:
    """A call in canonical form. arguments: an object, or its JSON; other text is kept as text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": name, "arguments": arguments or {}}
    return {"id": identity, "type": "function", "function": function}


def with_text_arguments(message: Message) -> dict[str, Any]:
    """The message with its calls' arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)
