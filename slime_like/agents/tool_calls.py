"""Parse model output into reasoning, text and tool calls.

Each family of chat templates has a format, recognised by the markers in the template. Unparsable
calls stay text and are counted.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, Any]  # name, arguments: an object, or invalid text


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed completion."""

    content: str
    reasoning: str = ""
    calls: Sequence[Call] = ()
    errors: int = 0  # number of unparsable calls, which stay in `content`


@dataclass(frozen=True, slots=True)
class Format:
    """The tool-call format of a model family."""

    marks: tuple[str, ...]  # texts in a chat template that together identify the family
    pattern: re.Pattern[str]  # matches everything that is not content
    read: Callable[[re.Match[str]], list[Call]]  # parses the calls of one match, or raises
    # text at the end of every match; text after its last occurrence is not searched, so that
    # unclosed marks do not take quadratic time
    closing: re.Pattern[str] | None = None
    start_only: bool = False  # the calls are the full text
    texts: bool = False  # arguments are text, and the tool's schema determines their types


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


def _spans(text: str, opening: str, closing: str) -> list[str]:
    """The texts between each opening mark and the next closing one."""
    result = []
    end = 0
    while (begin := text.find(opening, end)) >= 0:
        begin += len(opening)
        close = text.find(closing, begin)
        if close < 0:
            break
        result.append(text[begin:close])
        end = close + len(closing)
    return result


def _objects(text: str) -> list[Call]:
    """Parse JSON of one call or a list of calls."""
    value = json.loads(text)
    result = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") or item["tool_name"]
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("a call has a name and an object of arguments")
        result.append((name, arguments))
    return result


def _json_calls(match: re.Match[str]) -> list[Call]:
    return _objects(match[1])


def _named_json(match: re.Match[str]) -> list[Call]:
    return [(match[1].strip(), _object(match[2]))]


def _object(text: str) -> dict[str, object]:
    value = json.loads(text.strip() or "{}")
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    return value


def _typed(name: str, arguments: Mapping[str, str], tools: object) -> dict[str, object]:
    """Convert arguments in XML: text if the tool's schema says so, otherwise JSON if it is
    valid."""
    result: dict[str, object] = {}
    for key, text in arguments.items():
        types = _types(tools, name, key)
        result[key] = text
        if "string" not in types or (text == "null" and "null" in types):
            with contextlib.suppress(ValueError):
                result[key] = json.loads(text)
    return result


def _types(tools: object, name: str, key: str) -> Sequence[str]:
    """Types of an argument in a tool's schema; empty if unspecified."""
    for tool in tools if isinstance(tools, Sequence) else ():
        function = tool.get("function") or {}
        if function.get("name") == name:
            try:
                types = function["parameters"]["properties"][key]["type"]
            except (KeyError, TypeError):
                return ()
            return types if isinstance(types, list) else (str(types),)
    return ()


def _xml_parameters(match: re.Match[str]) -> list[Call]:
    result = {}
    for span in _spans(match[2], "<parameter=", "</parameter>"):
        name, mark, value = span.partition(">")
        if mark and name:
            result[name] = value.removeprefix("\n").removesuffix("\n")
    return [(match[1].strip(), result)]


def _xml_pairs(match: re.Match[str]) -> list[Call]:
    result = {}
    for span in _spans(match[2], "<arg_key>", "</arg_value>"):
        name, _, rest = span.partition("</arg_key>")
        before, mark, value = rest.partition("<arg_value>")
        if mark and not before.strip():
            result[name.strip()] = value
    return [(match[1].strip(), result)]


def _deepseek(match: re.Match[str]) -> list[Call]:
    result: list[Call] = []
    for span in _spans(match[1], "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        span = span.removeprefix("function<｜tool▁sep｜>")
        if parts := re.match(r"(.*?)(?:<｜tool▁sep｜>|\n```json\n)(.*)", span, re.DOTALL):
            name, arguments = parts.groups()
            result.append((name.split("\n", 1)[0].strip(), _object(_fenced(arguments))))
    return result


def _fenced(arguments: str) -> str:
    """The JSON of a call, without an optional code fence."""
    return arguments.strip().removeprefix("```json").removesuffix("```").strip()


def _kimi(match: re.Match[str]) -> list[Call]:
    result: list[Call] = []
    for span in _spans(match[1], "<|tool_call_begin|>", "<|tool_call_end|>"):
        name, mark, arguments = span.partition("<|tool_call_argument_begin|>")
        if mark:
            name = re.sub(r":\d+$", "", name.strip()).removeprefix("functions.")
            result.append((name, _object(arguments)))
    return result


def _python_calls(match: re.Match[str]) -> list[Call]:
    """Parse ``[name(key=value), ...]`` with literals only; nothing is executed."""
    tree = ast.parse(match[1].strip(), mode="eval").body
    result: list[Call] = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("no call with named arguments")
        arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        result.append((ast.unparse(call.func), arguments))
    return result


_CALL_END = _pattern("</tool_call>")
_LIST_END = _pattern(r"\]\s*+$")
FORMATS: dict[str, Format] = {  # possessive quantifiers: no backtracking
    "qwen3_coder": Format(
        ("<function=", "<parameter="),
        _pattern(r"(?<!\s)\s*+<tool_call>\s*+<function=([^>]++)>(.*?)</function>\s*+</tool_call>"),
        _xml_parameters,
        _pattern(r"</function>\s*+</tool_call>"),
        texts=True,
    ),
    "glm": Format(
        ("<tool_call>", "<arg_key>"),
        _pattern(r"(?<!\s)\s*+<tool_call>\s*+([^<\n]++)(.*?)</tool_call>"),
        _xml_pairs,
        _CALL_END,
        texts=True,
    ),
    "hermes": Format(
        ("<tool_call>",),
        _pattern(r"(?<!\s)\s*+<tool_call>(.*?)</tool_call>"),
        _json_calls,
        _CALL_END,
    ),
    "deepseek": Format(
        ("<｜tool▁calls▁begin｜>",),
        _pattern(r"(?<!\s)\s*+<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|$)"),
        _deepseek,
    ),
    "kimi": Format(
        ("<|tool_calls_section_begin|>",),
        _pattern(
            r"(?<!\s)\s*+<\|tool_calls_section_begin\|>(.*?)(?:<\|tool_calls_section_end\|>|$)"
        ),
        _kimi,
    ),
    "harmony": Format(
        ("<|channel|>", "<|call|>"),
        _pattern(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.([\w.-]++)"
            r"(?:<\|channel\|>commentary)?\s*+(?:<\|constrain\|>)?\w*+<\|message\|>(.*?)"
            r"(?:<\|call\|>|$)"
        ),
        _named_json,
    ),
    "mistral": Format(
        ("[TOOL_CALLS]", "[ARGS]"),
        _pattern(r"\[TOOL_CALLS\]([^\[]++)\[ARGS\](\{.*?\})(?=\[TOOL_CALLS\]|$)"),
        _named_json,
        _pattern(r"\}(?=\[TOOL_CALLS\]|$)"),
    ),
    "mistral_list": Format(
        ("[TOOL_CALLS]",),
        _pattern(r"(?<!\s)\s*+\[TOOL_CALLS\]\s*+(\[.*\])\s*+$"),
        _json_calls,
        _LIST_END,
    ),
    "command": Format(
        ("<|START_ACTION|>",),
        _pattern(r"(?<!\s)\s*+<\|START_ACTION\|>(.*?)<\|END_ACTION\|>"),
        _json_calls,
        _pattern(r"<\|END_ACTION\|>"),
    ),
    "phi": Format(
        ("<|tool_call|>", "<|/tool_call|>"),
        _pattern(r"(?<!\s)\s*+<\|tool_call\|>(.*?)<\|/tool_call\|>"),
        _json_calls,
        _pattern(r"<\|/tool_call\|>"),
    ),
    "granite": Format(
        ("<|tool_call|>",),
        _pattern(r"(?<!\s)\s*+<\|tool_call\|>\s*+(\[.*\])\s*+$"),
        _json_calls,
        _LIST_END,
    ),
    "python": Format(
        ("```tool_code",),
        _pattern(r"(?<!\s)\s*+```tool_code\n(.*?)\n```"),
        _python_calls,
        _pattern(r"\n```"),
    ),
    "llama3": Format(
        ("<|python_tag|>", "parameters"),
        _pattern(r"^\s*+(?:<\|python_tag\|>)?\s*+(\{.*\})\s*+$"),
        _json_calls,
        start_only=True,
    ),
}
NO_TOOLS = "none"
# errors when parsing a model's text, which may be anything
_UNREADABLE = (
    ValueError, KeyError, TypeError, SyntaxError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip


def format_of(template: str) -> str:
    """The first format all of whose marks are in a chat template; NO_TOOLS if there is none."""
    for name, call_format in FORMATS.items():
        if all(mark in template for mark in call_format.marks):
            return name
    return NO_TOOLS


def parse(
    text: str, format_name: str, *, open_thought: bool = False, tools: object = True
) -> Parsed:
    """Parse a completion.

    Args:
        text: Without the end token.
        format_name: A key of `FORMATS`, or NO_TOOLS.
        open_thought: The prompt ended inside a thought.
        tools: Of the request; their schemas say which arguments are text. Without any, marks are
            mere text.
    """
    reasoning, content = _thought(text, open_thought)
    if format_name == "harmony":
        reasoning, content = _channels(text)
    if not tools or format_name == NO_TOOLS:
        return Parsed(content, reasoning)
    call_format = FORMATS[format_name]
    calls: list[Call] = []
    errors = 0

    def take(match: re.Match[str]) -> str:
        nonlocal errors
        try:
            result = call_format.read(match)
            if not result:
                raise ValueError("no call")
            if call_format.texts:
                result = [(name, _typed(name, arguments, tools)) for name, arguments in result]
            # reject values that JSON cannot represent, since clients receive JSON
            result = [(name, json.loads(json.dumps(a, allow_nan=False))) for name, a in result]
            calls.extend(result)
        except _UNREADABLE:
            errors += not call_format.start_only
            return match[0]
        return ""

    end = len(content)
    if call_format.closing is not None:
        end = max((match.end() for match in call_format.closing.finditer(content)), default=0)
    rest = call_format.pattern.sub(take, content[:end]) + content[end:]
    return Parsed(rest, reasoning, tuple(calls), errors)


def _thought(text: str, is_open: bool) -> tuple[str, str]:
    """Split ``<think>...</think>`` into (thoughts, rest); an unclosed thought extends to the
    end."""
    begins = re.match(r"\s*<think>", text)
    if not is_open and begins is None:
        return "", text
    body = text if begins is None else text[begins.end() :]
    thought, mark, rest = body.partition("</think>")
    return thought.strip("\n"), rest.lstrip("\n") if mark else ""


def _channels(text: str) -> tuple[str, str]:
    """Split OpenAI's harmony format into (analysis, final content and calls)."""
    pattern = r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)"
    reasoning = "".join(re.findall(pattern, text, re.DOTALL))
    rest = re.sub(pattern, "", text, flags=re.DOTALL)
    mark = (
        r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|$)"
    )
    return reasoning, re.sub(mark, r"\1", rest, flags=re.DOTALL)
