"""OpenAI's responses as a stream of server-sent events, all sent after generation has finished."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any


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
        for kind, fields in _item(item, index):
            yield event(f"response.{kind}", fields)
    yield event(f"response.{answer['status']}", {"response": answer})


def _item(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, object]]]:
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
