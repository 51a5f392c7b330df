"""Parse model output (reasoning, tool calls) with a library: transformers, by the tokenizer's
response template, or SGLang's tool-call parsers, if SGLang is installed in this Python.

Unparsable calls stay text and are counted, as in `tool_calls`, which has the families without a
response template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slime_like.agents.tool_calls import NO_TOOLS, Call, Parsed, format_of, parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# SGLANG is followed by the name of a parser
TRANSFORMERS = "transformers"
SGLANG = "sglang:"
THOUGHT = "<think>"
# Characters that SGLang's expressions may search, about a second: from each opening mark without a
# closing one they search the rest of the text. 24,000 such marks, each a token, would take 20 s.
MAX_SEARCHED = 10**8


def default_format(tokenizer: PreTrainedTokenizerBase) -> str:
    """TRANSFORMERS if the tokenizer has a response template, otherwise the key of
    `tool_calls.FORMATS` that matches its chat template."""
    if getattr(tokenizer, "response_template", None) is not None:
        return TRANSFORMERS
    return format_of(str(tokenizer.chat_template))


def parse_answer(
    text: str,
    format_name: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str,
    tools: Sequence[object] | None = None,
) -> Parsed:
    """Parse a completion with the parser of its format.

    Args:
        text: Without the end token.
        format_name: TRANSFORMERS, SGLANG followed by a parser's name, a key of
            `tool_calls.FORMATS`, or NO_TOOLS.
        tokenizer: The model's.
        prefix: The end of the prompt, which may have opened a thought.
        tools: Of the request, in OpenAI's format. Without tools, calls are plain text.
    """
    open_thought = prefix.rstrip().endswith(THOUGHT)
    as_text = parse(text, NO_TOOLS, open_thought=open_thought)
    try:
        if format_name == TRANSFORMERS:
            parsed = _by_transformers(text, tokenizer, prefix, tools)
            return parsed if tools or not parsed.calls else as_text
        if format_name.startswith(SGLANG) and tools:
            return _by_sglang(as_text, format_name.removeprefix(SGLANG), tokenizer, tools)
    except Exception:  # a library may raise anything on text of a model
        return Parsed(as_text.content, as_text.reasoning, errors=1)
    format_key = NO_TOOLS if format_name.startswith(SGLANG) else format_name
    return parse(text, format_key, open_thought=open_thought, tools=tools)


def _by_transformers(
    text: str, tokenizer: PreTrainedTokenizerBase, prefix: str, tools: object
) -> Parsed:
    from transformers.utils.chat_parsing import ResponseParser

    parser = ResponseParser(tokenizer.response_template, prefix=prefix, tools=tools or None)
    if hasattr(parser, "_buffer"):
        # `feed` looks for marks that the next piece of text may complete: with transformers 5.24 it
        # takes 88 s for 4,000 empty thoughts. There is no next piece; `finalize` takes 0.1 s.
        parser._buffer += text
    else:
        parser.feed(text)
    message, _ = parser.finalize()
    calls = [_call(each["function"]) for each in message.get("tool_calls") or ()]
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    content = message.get("content") or ""
    return Parsed(content, reasoning.strip("\n"), calls)


def _by_sglang(answer: Parsed, name: str, tokenizer: object, tools: Sequence[object]) -> Parsed:
    """Parse tool calls with SGLang. answer: without its thought, which SGLang's tool-call parsers
    do not handle."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    sglang_tools = [Tool.model_validate(tool) for tool in tools]
    parser = FunctionCallParser(sglang_tools, name, tokenizer=tokenizer)
    if not parser.has_tool_call(answer.content):
        return answer
    opening = parser.detector.bot_token
    if opening and answer.content.count(opening) * len(answer.content) > MAX_SEARCHED:
        raise ValueError("too many opening marks")
    content, parsed_calls = parser.parse_non_stream(answer.content)
    if not parsed_calls:
        raise ValueError("no call could be read")
    calls = [_call({"name": each.name, "arguments": each.parameters}) for each in parsed_calls]
    return Parsed(content.strip("\n"), answer.reasoning, calls)


def _call(function: Mapping[str, object]) -> Call:
    """Convert a parsed call. Raises ValueError for values that JSON cannot represent, and for
    arguments that are not an object."""
    name = function["name"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    return name, json.loads(json.dumps(arguments, allow_nan=False))
