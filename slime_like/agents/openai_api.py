"""OpenAI's chat completions API: parse request bodies, and format responses and streams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime_like.agents.messages import BadRequest
from slime_like.agents.sessions import Choice, ParsedRequest, Session, messages_of
from slime_like.data.messages import Message
from slime_like.engines.base import SamplingParams

MOST_STOPS = 16
# parameters without an effect on the response
KNOWN = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "logprobs",
    "prompt_cache_key",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "messages",
    "tools",
    "n",
    "stop",
    "seed",
    "max_tokens",
    "max_completion_tokens",
}
# values of other parameters that leave a feature off
NEUTRAL: Mapping[str, Sequence[object]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


# wishes about the form of an answer, which are not enforced: harnesses send them with every request
HINTS = frozenset(["tool_choice", "response_format", "text"])


def parse_chat_request(body: Mapping[str, object], sampling: SamplingParams) -> ParsedRequest:
    """Parse a request body of the Chat Completions API. sampling: the run's, which overrides the
    client's.

    Raises:
        BadRequest: Names the invalid or unsupported parameter.
    """
    reject_unsupported(body, KNOWN, NEUTRAL)
    tools = parse_tools(body.get("tools"), lambda tool: tool)
    if body.get("tool_choice") == "none":
        tools = None
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    return ParsedRequest(
        tuple(messages_of(body)),
        tools,
        n=1 if body.get("n") is None else parse_int(body["n"], "n", 1),
        stop=parse_stop_strings(body.get("stop"), "stop"),
        max_tokens=None if limit is None else parse_int(limit, "max_tokens", 1),
        seed=None if body.get("seed") is None else parse_int(body["seed"], "seed", -(2**63)),
        overridden=count_overridden(body, sampling, NEUTRAL),
    )


def reject_unsupported(
    body: Mapping[str, object], known: set[str], neutral: Mapping[str, Sequence[object]]
) -> None:
    """Raise BadRequest naming unsupported parameters of a body."""
    for name, value in body.items():
        if value is None or name in known or value in neutral.get(name, ()):
            continue
        if is_hint(name, value, neutral):
            continue
        legal = neutral.get(name)
        legal_values = f"; legal: {', '.join(map(json.dumps, legal))}" if legal else ""
        raise BadRequest(
            f"{name} = {json.dumps(value, default=str)[:100]} is not offered{legal_values}"
        )


def is_hint(name: str, value: object, neutral: Mapping[str, Sequence[object]]) -> bool:
    """Whether this parameter asks for a form of the answer (a tool, JSON). What the policy answers
    is its own choice: the request is taken as without it, and counted."""
    return name in HINTS and name in neutral and isinstance(value, str | dict)


def count_overridden(
    body: Mapping[str, object],
    sampling: SamplingParams,
    neutral: Mapping[str, Sequence[object]],
) -> int:
    """Number of the client's parameters that have no effect: sampling parameters that differ from
    the run's, and wishes about the form of the answer."""
    count = sum(
        body.get(name) is not None and body[name] != getattr(sampling, name)
        for name in ("temperature", "top_p", "top_k")
    )
    return count + sum(
        is_hint(name, value, neutral) and value not in neutral[name] for name, value in body.items()
    )


def parse_int(value: object, name: str, least: int) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise BadRequest(f"{name} is {str(value)[:40]}, must be a whole number from {least}")
    return value


def parse_stop_strings(value: object, name: str) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(strings, list)
        or len(strings) > MOST_STOPS
        or not all(isinstance(text, str) and text for text in strings)
    ):
        raise BadRequest(f"{name} must be text, or a list of at most {MOST_STOPS} non-empty texts")
    return tuple(strings)


def parse_tools(
    value: object, convert: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """Tools for the chat template, in the format of chat completions; None if there are none."""
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRequest("tools must be a list of objects")
    tools = [convert(tool) for tool in value]
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise BadRequest(f"tools[{i}]: only functions with a name are offered")
    return tools


def chat_json(
    choices: Sequence[Choice], session: Session, model: str, *, logprobs: bool
) -> dict[str, object]:
    """The response to a request."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": i,
                "message": wire_message(choice.message),
                "finish_reason": choice.finish,
                "logprobs": token_log_probs(choice, session) if logprobs else None,
            }
            for i, choice in enumerate(choices)
        ],
        "usage": usage(choices),
    }


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt = choices[0].prompt_tokens
    generated = sum(len(c.tokens) for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def wire_message(message: Message) -> dict[str, object]:
    """A canonical message in the format of chat completions, where arguments are JSON text."""
    result = dict(message)
    result["content"] = message["content"] or (None if message.get("tool_calls") else "")
    if "tool_calls" in message:
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_text(call)}}
            for call in message["tool_calls"]
        ]
    return result


def arguments_text(call: Message) -> str:
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def token_log_probs(choice: Choice, session: Session) -> dict[str, object]:
    """Log-probs of every generated token, including the end token."""
    content = []
    for token, log_prob in zip(choice.tokens, choice.log_probs, strict=True):
        text = session.token_text(token)
        utf8 = list(text.encode("utf-8", "replace"))
        content.append({"token": text, "logprob": log_prob, "bytes": utf8, "top_logprobs": []})
    return {"content": content, "refusal": None}


def chat_stream(answer: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """The same response as server-sent events, all sent after generation has finished."""
    shared = {k: answer[k] for k in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }

    def event(choices: list[dict[str, object]], **fields: object) -> str:
        return f"data: {json.dumps({**shared, 'choices': choices, **fields})}\n\n"

    def part(index: int, delta: Mapping[str, object], finish: str | None = None) -> str:
        return event([{"index": index, "delta": delta, "finish_reason": finish}])

    for choice in answer["choices"]:
        i = choice["index"]
        message = choice["message"]
        yield part(i, {"role": "assistant", "content": ""})
        if message.get("reasoning_content"):
            yield part(i, {"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            delta = {"index": i, "delta": {"content": message["content"]}, "finish_reason": None}
            yield event([delta | {"logprobs": choice["logprobs"]}])
        elif choice["logprobs"]:
            delta = {"index": i, "delta": {}, "finish_reason": None}
            yield event([delta | {"logprobs": choice["logprobs"]}])
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield part(i, {"tool_calls": [{"index": index, **call}]})
        yield part(i, {}, choice["finish_reason"])
    if with_usage:
        yield event([], usage=answer["usage"])
    yield "data: [DONE]\n\n"
