"""Answers of a dozen families, read by transformers' response templates, by SGLang's parsers where it is
installed, and by our own formats: the same thoughts, texts and calls."""

from __future__ import annotations

import copy
import json
import re
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arguments.schema.agents import SGLANG_PARSERS
from slime_like.agents.answer_parsers import SGLANG, TRANSFORMERS, default_format, parse_answer
from slime_like.agents.tool_calls import Parsed
from tests.agent_templates import FAMILIES, call_text, make_tokenizer

NUMBER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": NUMBER}}
    for name in ("weather", "time")
]
CALLS = [("weather", {"city": "Zürich", "days": 3}), ("time", {"city": "Rom"})]


def template(
    call: dict[str, Any], *, ends: str, anchor: str, thinks: bool = True
) -> dict[str, Any]:
    """A response template.

    Args:
        call: The field of one call.
        ends: Of an answer.
    """
    thought = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchor,
        "fields": {
            **(thought if thinks else {}),
            "tool_calls": {"repeats": True, **call},
            "content": {"close": ends, "content": "text"},
        },
    }


def named(arguments: str = "{content}") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "{name}", "arguments": arguments}}


JSON_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
CHATML = "<|im_start|>assistant\n"
# family: its response template, as a checkpoint would bring it
RESPONSE_TEMPLATES = {
    "qwen3": template(
        {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **JSON_CALL},
        ends="<|im_end|>", anchor=CHATML,
    ),
    "qwen3_coder": template(
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline", "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": named(),
        },
        ends="<|im_end|>", anchor=CHATML,
    ),
    "glm": template(
        {
            "open_pattern": r"\s*<tool_call>(?P<name>[^\n<]+)", "close": "</tool_call>", "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": named(),
        },
        ends="<|endoftext|>", anchor="<|assistant|>\n",
    ),
    "mistral_args": template(
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[]+)\[ARGS\]", "close_pattern": r"(?=\[TOOL_CALLS\])|$", "content": "json",
            "transform": named(),
        },
        ends="</s>", anchor="[/INST]", thinks=False,
    ),
    "kimi": template(
        {
            "open_pattern": r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>functions\.(?P<name>\w+):\d+<\|tool_call_argument_begin\|>",
            "close_pattern": r"<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?", "content": "json", "transform": named(),
        },
        ends="<|im_end|>", anchor="<|im_assistant|>assistant<|im_middle|>",
    ),
    "phi": template(
        {"open": "<|tool_call|>", "close": "<|/tool_call|>", **JSON_CALL}, ends="<|end|>", anchor="<|assistant|>"
    ),
}  # fmt: skip
PREFIXES = {
    "qwen3": CHATML, "qwen3_coder": CHATML, "glm": "<|assistant|>\n", "mistral_args": "[/INST]",
    "kimi": "<|im_assistant|>assistant<|im_middle|>", "phi": "<|assistant|>",
}  # fmt: skip
# SGLang's parser: the family that writes so, or what a model writes for CALLS; None: as qwen3
SGLANG_ANSWERS = {
    "qwen25": None,
    "hermes": None,
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm",
    "mistral": "mistral",
    "deepseekv3": "deepseek",
    "kimi_k2": "kimi",
    "llama3": "llama3",
    "pythonic": '[weather(city="Zürich", days=3), time(city="Rom")]',
    "deepseekv31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich", "days": 3}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>time<｜tool▁sep｜>{"city": "Rom"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|><|tool_call>call:time{city:<|"|>Rom<|"|>}<tool_call|>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n<parameter name="days">3</parameter>\n'
    '</invoke>\n<invoke name="time">\n<parameter name="city">Rom</parameter>\n</invoke>\n</minimax:tool_call>',
    "lfm2": '<|tool_call_start|>[weather(city="Zürich", days=3), time(city="Rom")]<|tool_call_end|>',
}  # fmt: skip
ONE_CALL = ("llama3",)


def tokenizer_of(family: str) -> Any:
    """With its response template, where it has one here."""
    found = copy.copy(make_tokenizer(FAMILIES[family]))
    found.response_template = RESPONSE_TEMPLATES.get(family)
    return found


@pytest.mark.parametrize("family", RESPONSE_TEMPLATES)
def test_transformers_reads_what_our_formats_read(family: str) -> None:
    tokenizer = tokenizer_of(family)
    assert default_format(tokenizer) == TRANSFORMERS
    text = "I look.\n" + call_text(FAMILIES[family], CALLS)
    settings = dict(tokenizer=tokenizer, prefix="hello" + PREFIXES[family], tools=TOOLS)
    theirs = parse_answer(text, TRANSFORMERS, **settings)  # type: ignore[arg-type]
    ours = parse_answer(text, FAMILIES[family].format, **settings)  # type: ignore[arg-type]
    assert list(theirs.calls) == list(ours.calls) == CALLS and theirs.errors == 0
    assert theirs.content.strip() == ours.content.strip() == "I look."


def test_a_thought_that_the_prompt_has_begun() -> None:
    settings = dict(tokenizer=tokenizer_of("qwen3"), prefix=CHATML + "<think>\n", tools=TOOLS)
    text = "so be it\n</think>\n\nI look." + call_text(FAMILIES["qwen3"], CALLS)
    for name in (TRANSFORMERS, "hermes"):
        found = parse_answer(text, name, **settings)  # type: ignore[arg-type]
        assert (found.reasoning, found.content.strip()) == ("so be it", "I look.")
        assert list(found.calls) == CALLS


@pytest.mark.parametrize(
    "text", ["<tool_call>\n{not json}\n</tool_call>", "<tool_call>\n[1, 2]\n</tool_call>"]
)
def test_what_transformers_cannot_read_stays_text_and_is_counted(text: str) -> None:
    settings = dict(tokenizer=tokenizer_of("qwen3"), prefix=CHATML)
    found = parse_answer(text, TRANSFORMERS, tools=TOOLS, **settings)  # type: ignore[arg-type]
    assert found == Parsed(text, errors=1)


def test_without_tools_calls_are_mere_text() -> None:
    text = "I look." + call_text(FAMILIES["qwen3"], CALLS)
    found = parse_answer(text, TRANSFORMERS, tokenizer=tokenizer_of("qwen3"), prefix=CHATML)
    assert found == Parsed(text)


def test_a_tokenizer_without_a_response_template_is_read_by_its_marks() -> None:
    for name, family in FAMILIES.items():
        if name not in RESPONSE_TEMPLATES:
            assert default_format(tokenizer_of(name)) == family.format


def sglang_case(name: str) -> tuple[str, list[tuple[str, Any]]]:
    """(text, the calls in it) of a parser of SGLang's."""
    given = SGLANG_ANSWERS[name]
    calls = CALLS[:1] if name in ONE_CALL else CALLS
    return given if given not in (None, *FAMILIES) else call_text(
        FAMILIES[given or "qwen3"], calls
    ), calls


def test_every_parser_of_the_flag_has_a_text() -> None:
    assert set(SGLANG_ANSWERS) == set(SGLANG_PARSERS) and len(SGLANG_PARSERS) >= 12


@pytest.mark.parametrize("name", SGLANG_ANSWERS)
def test_sglang_reads_its_families(name: str) -> None:
    """Where it is in this Python; tests/sglang does it in SGLang's own."""
    pytest.importorskip("sglang.srt.function_call.function_call_parser")
    text, calls = sglang_case(name)
    settings = dict(tokenizer=make_tokenizer(FAMILIES["qwen3"]), prefix="", tools=TOOLS)
    found = parse_answer(text, SGLANG + name, **settings)  # type: ignore[arg-type]
    assert (list(found.calls), found.errors) == (calls, 0), found
    thought = parse_answer("<think>\nhm\n</think>\n\n" + text, SGLANG + name, **settings)  # type: ignore[arg-type]
    assert (thought.reasoning, list(thought.calls)) == ("hm", calls)
    assert parse_answer("no call", SGLANG + name, **settings) == Parsed("no call")  # type: ignore[arg-type]


def test_an_unknown_tool_is_no_call_for_sglang() -> None:
    pytest.importorskip("sglang.srt.function_call.function_call_parser")
    text = call_text(FAMILIES["qwen3"], [("nothing", {})])
    found = parse_answer(text, SGLANG + "qwen25", tokenizer=None, prefix="", tools=TOOLS)
    assert found == Parsed(text, errors=1)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls", "errors"),
    [
        ("<think></think>" * 4000, 0, 0),
        ("word " * 100_000, 0, 0),
        (" " * 60_000 + "a", 0, 0),
        ("\n" * 60_000 + CALL, 1, 0),
        ((" " * 1000 + "<think></think>") * 250, 0, 0),
        ("<tool_call>{}</tool_call>" * 4000, 0, 1),
        (CALL * 2000, 2000, 0),
    ],
    ids=["thoughts", "words", "spaces", "lines", "spaces and thoughts", "empty calls", "calls"],
)
def test_no_text_takes_transformers_long(text: str, calls: int, errors: int) -> None:
    began = time.process_time()
    found = parse_answer(text, TRANSFORMERS, tokenizer=tokenizer_of("qwen3"), prefix=CHATML, tools=TOOLS)  # fmt: skip
    assert time.process_time() - began < 5
    assert (len(found.calls), found.errors) == (calls, errors)


class SglangsParser:
    """Reads calls with the expression of SGLang's qwen25 detector (0.5.23)."""

    def __init__(self, tools: list[object], name: str, tokenizer: object) -> None:
        self.detector = SimpleNamespace(bot_token="<tool_call>")

    def has_tool_call(self, text: str) -> bool:
        return self.detector.bot_token in text

    def parse_non_stream(self, text: str) -> tuple[str, list[object]]:
        found = re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return text[: text.find("<tool_call>")], [
            SimpleNamespace(name=call["name"], parameters=json.dumps(call["arguments"]))
            for call in map(json.loads, found)
        ]


def test_marks_that_nothing_closes_do_not_take_sglang_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = "sglang.srt"
    for name in (
        "sglang", package, f"{package}.entrypoints", f"{package}.entrypoints.openai", f"{package}.function_call"
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    protocol = ModuleType("protocol")
    protocol.Tool = SimpleNamespace(model_validate=lambda tool: tool)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{package}.entrypoints.openai.protocol", protocol)
    parsers = ModuleType("parsers")
    parsers.FunctionCallParser = SglangsParser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{package}.function_call.function_call_parser", parsers)
    settings = dict(tokenizer=None, prefix="", tools=TOOLS)
    began = time.process_time()
    text = "<tool_call>" * 24_000
    assert parse_answer(text, SGLANG + "qwen25", **settings) == Parsed(text, errors=1)  # type: ignore[arg-type]
    assert time.process_time() - began < 5
    found = parse_answer("word " * 20_000 + CALL * 100, SGLANG + "qwen25", **settings)  # type: ignore[arg-type]
    assert list(found.calls) == [("weather", {"city": "Rom"})] * 100 and found.errors == 0
