"""Anthropic's messages API: parse request bodies, and format responses and streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from slime_like.agents.messages import BadRequest, canonical
from slime_like.agents.openai_api import (
    count_overridden,
    parse_int,
    parse_stop_strings,
    parse_tools,
    reject_unsupported,
)
from slime_like.agents.sessions import Choice, ParsedRequest
from slime_like.data.messages import ASSISTANT, tool_call
from slime_like.engines.base import SamplingParams

KNOWN = {
    "model",
    "messages",
    "system",
    "max_tokens",
    "stop_sequences",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "metadata",
    "tools",
    "service_tier",
}
NEUTRAL = {"tool_choice": ({"type": "auto"}, {"type": "none"}), "thinking": ({"type": "disabled"},)}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_messages_request(
    body: Mapping[str, object], sampling: SamplingParams
) -> tuple[ParsedRequest, int]:
    """Parse a request body of the Messages API. Also returns how many tool results in its last
    message are errors.

    Raises:
        BadRequest: Names the invalid or unsupported parameter.
    """
    reject_unsupported(body, KNOWN, NEUTRAL)
    tools = parse_tools(body.get("tools"), _function)
    if body.get("tool_choice") == {"type": "none"}:
        tools = None
    messages: list[dict[str, object]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _texts(body["system"], "system")})
    body_messages = body.get("messages")
    if not isinstance(body_messages, list) or not body_messages:
        raise BadRequest("messages must be a list of at least one message")
    if isinstance(body_messages[-1], dict) and body_messages[-1].get("role") == ASSISTANT:
        raise BadRequest("messages: prefilled answers are not supported; end with a user message")
    num_errors = 0
    for index, message in enumerate(body_messages):
        parsed, num_errors = _read(message, index)
        messages += parsed
    ask = ParsedRequest(
        tuple(messages),
        tools,
        stop=parse_stop_strings(body.get("stop_sequences"), "stop_sequences"),
        max_tokens=parse_int(body.get("max_tokens"), "max_tokens", 1),
        overridden=count_overridden(body, sampling, NEUTRAL),
    )
    return ask, num_errors


def _function(tool: Mapping[str, object]) -> dict[str, object]:
    if tool.get("type", "custom") != "custom":
        raise BadRequest(f"tools of type {str(tool['type'])[:60]!r} are not supported")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {n: tool[k] for k, n in names.items() if k in tool}}


def _texts(value: object, where: str) -> str:
    """Text, or concatenated blocks of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} must be text or a list of blocks")
    for block in value:
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            raise BadRequest(f"{where}: only blocks of text are offered")
    return "".join(block["text"] for block in value)


def _read(message: object, index: int) -> tuple[list[dict[str, object]], int]:
    """Convert one of Anthropic's messages to canonical form, and count its tool results that are
    errors; tool results come before the text of the same message."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ("user", ASSISTANT):
        raise BadRequest(f"{where} must be an object with the role user or assistant")
    role = message["role"]
    content = message.get("content")
    if isinstance(content, str):
        return [canonical({"role": role, "content": content}, index)], 0
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"{where}.content must be text or a list of blocks")
    parts = list[dict[str, object]]()
    thoughts = list[str]()
    num_errors = 0
    calls = list[dict[str, object]]()
    results = list[dict[str, object]]()
    for i, block in enumerate(content):
        kind = block.get("type")
        place = f"{where}.content[{i}]"
        if kind == "text" or (kind == "image" and role == "user"):
            parts += _parts([block], place)
        elif kind == "thinking" and role == ASSISTANT:
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use" and role == ASSISTANT and isinstance(block.get("name"), str):
            calls.append(tool_call(str(block.get("id", "")), block["name"], block.get("input")))
        elif kind == "tool_result" and role == "user":
            result = {"role": "tool", "content": _parts(block.get("content") or "", place)}
            identity = str(block.get("tool_use_id", ""))
            results.append(canonical({**result, "tool_call_id": identity}, index))
            num_errors += bool(block.get("is_error"))
        else:
            raise BadRequest(f"{place}: a block of type {str(kind)[:40]!r} is not offered there")
    message_out = canonical({"role": role, "content": parts or ""}, index)
    if thoughts:
        message_out["reasoning_content"] = "".join(thoughts)
    if calls:
        message_out["tool_calls"] = calls
    if parts or calls or thoughts or not results:
        results.append(message_out)
    return results, num_errors


def _parts(value: object, where: str) -> list[dict[str, object]]:
    """A text, or blocks of text and images, as OpenAI's parts."""
    if not isinstance(value, list) or not any(
        isinstance(block, dict) and block.get("type") == "image" for block in value
    ):
        return [{"type": "text", "text": _texts(value, where)}]
    parts = list[dict[str, object]]()
    for block in value:
        if isinstance(block, dict) and block.get("type") == "image":
            parts.append({"type": "image_url", "image_url": {"url": _url(block, where)}})
        else:
            parts.append({"type": "text", "text": _texts([block], where)})
    return parts


def _url(block: Mapping[str, object], where: str) -> object:
    """The address of an image, a data URL if the block has the image itself."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if isinstance(source, dict) and source.get("type") == "url":
        return source.get("url")
    raise BadRequest(f"{where}: the source of an image must be of type base64 or url")


def messages_json(choice: Choice, model: str) -> dict[str, object]:
    """The response to a request."""
    message = choice.message
    blocks: list[dict[str, object]] = []
    if message.get("reasoning_content"):
        blocks.append(
            {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
        )
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**block, "input": function["arguments"]})
    stopped = choice.stop is not None and choice.finish != "tool_calls"
    reason = "stop_sequence" if stopped else _STOP_REASONS[choice.finish]
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": ASSISTANT,
        "model": model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": choice.stop if stopped else None,
        "usage": {"input_tokens": choice.prompt_tokens, "output_tokens": len(choice.tokens)},
    }


def messages_stream(answer: Mapping[str, Any]) -> Iterator[str]:
    """The same response as server-sent events, all sent after generation has finished."""

    def event(kind: str, **values: object) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"

    begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message=begun)
    for i, block in enumerate(answer["content"]):
        empty: dict[str, object]
        if block["type"] == "text":
            empty = {"text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        elif block["type"] == "thinking":
            empty = {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        else:
            text = json.dumps(block["input"], ensure_ascii=False)
            empty = {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": text}]
        yield event("content_block_start", index=i, content_block={**block, **empty})
        for delta in deltas:
            yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    ended = {k: answer[k] for k in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage=answer["usage"])
    yield event("message_stop")
