"""OpenAI's responses API, stateless on the server side."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_like.agents.messages import BadRequest, canonical
from slime_like.agents.openai_api import (
    arguments_text,
    count_overridden,
    parse_int,
    parse_tools,
    reject_unsupported,
)
from slime_like.agents.sessions import Choice, ParsedRequest
from slime_like.data.messages import ASSISTANT, tool_call
from slime_like.engines.base import SamplingParams

KNOWN = {
    "model",
    "input",
    "instructions",
    "tools",
    "max_output_tokens",
    "temperature",
    "top_p",
    "metadata",
    "user",
    "store",
    "truncation",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream",
}
NEUTRAL: Mapping[str, Sequence[object]] = {
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "background": (False,),
    "include": ([],),
    "text": ({"format": {"type": "text"}},),
}


def parse_responses_request(body: Mapping[str, object], sampling: SamplingParams) -> ParsedRequest:
    """Parse a request body of the Responses API. Raises BadRequest naming the invalid or
    unsupported parameter."""
    reject_unsupported(body, KNOWN, NEUTRAL)
    tools = parse_tools(body.get("tools"), _function)
    messages: list[dict[str, object]] = []
    if body.get("instructions"):
        messages.append(canonical({"role": "system", "content": body["instructions"]}, 0))
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest("input must be text, or a list of at least one item")
    for index, item in enumerate(items):
        _add(messages, item, index)
    limit = body.get("max_output_tokens")
    return ParsedRequest(
        tuple(messages),
        None if body.get("tool_choice") == "none" else tools,
        max_tokens=None if limit is None else parse_int(limit, "max_output_tokens", 1),
        overridden=count_overridden(body, sampling, NEUTRAL),
    )


def _function(tool: Mapping[str, object]) -> dict[str, object]:
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": tool.get("type"), "function": function}


def _add(messages: list[dict[str, Any]], item: Any, place: int) -> None:
    """Append an input item; consecutive items of one assistant turn are merged into one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        message = canonical(item, place)
        last = messages[-1] if messages else {}
        if message["role"] == ASSISTANT and set(last) == {"role", "content", "reasoning_content"}:
            last["content"] += message["content"]
        else:
            messages.append(message)
    elif kind == "reasoning":
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        messages.append({"role": ASSISTANT, "content": "", "reasoning_content": thought})
    elif kind == "function_call" and isinstance(item.get("name"), str):
        call = tool_call(str(item.get("call_id", "")), item["name"], item.get("arguments"))
        if not messages or messages[-1]["role"] != ASSISTANT:
            messages.append({"role": ASSISTANT, "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = canonical({"role": "tool", "content": item.get("output")}, place)
        messages.append({**text, "tool_call_id": str(item.get("call_id", ""))})
    else:
        raise BadRequest(f"input[{place}]: items of type {str(kind)[:40]!r} are not offered")


def responses_json(choice: Choice, model: str) -> dict[str, object]:
    """The response to a request."""
    message = choice.message
    output = list[dict[str, object]]()
    if thought := message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": thought}
        output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [text]})
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        item = {"type": "message", "id": _id("msg"), "role": ASSISTANT, "status": "completed"}
        output.append({**item, "content": [text]})
    for call in message.get("tool_calls") or ():
        item = {"type": "function_call", "id": _id("fc"), "call_id": call["id"]}
        function = {"name": call["function"]["name"], "arguments": arguments_text(call)}
        output.append({**item, **function, "status": "completed"})
    truncated = choice.finish == "length"
    prompt = choice.prompt_tokens
    generated = len(choice.tokens)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "error": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + generated,
        },
    }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def responses_stream(answer: Mapping[str, Any]) -> Iterator[str]:
    """Server-sent events for a response of `responses_json`, numbered from 0: the response without
    output, each item with its parts, and the full response."""
    numbers = itertools.count()

    def event(kind: str, fields: Mapping[str, object]) -> str:
        value = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(value)}\n\n"

    empty = {**answer, "status": "in_progress", "output": [], "usage": None}
    begun = empty | {"incomplete_details": None}
    for kind in ("created", "in_progress"):
        yield event(f"response.{kind}", {"response": begun})
    for index, item in enumerate(answer["output"]):
        for kind, fields in _item_events(item, index):
            yield event(f"response.{kind}", fields)
    yield event(f"response.{answer['status']}", {"response": answer})


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Types and fields of an item's events."""
    place = {"item_id": item["id"], "output_index": index}
    empty: dict[str, object] = {"content": []}
    if item["type"] == "function_call":
        empty = {"arguments": ""}
    opened = {**item, "status": "in_progress", **empty}
    yield "output_item.added", {"output_index": index, "item": opened}
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "function_call_arguments.done", {**place, **done}
    else:
        for number, part in enumerate(item["content"]):
            at = {**place, "content_index": number}
            yield "content_part.added", {**at, "part": {**part, "text": ""}}
            log_probs: dict[str, object] = {"logprobs": []} if item["type"] == "message" else {}
            if part["text"]:
                yield f"{part['type']}.delta", {**at, "delta": part["text"], **log_probs}
            yield f"{part['type']}.done", {**at, "text": part["text"], **log_probs}
            yield "content_part.done", {**at, "part": part}
    yield "output_item.done", {"output_index": index, "item": item}
