"""Rows of prompt files: whatever they hold, they become prompts, or one sentence with file and line.

With the chat template and without it, as conversations, as pairs, and with the checks of every reward.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unicodedata import bidirectional, category

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arguments.schema.data import DataConfig
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.data.prompts import PromptSource
from slime_like.rewards.registry import answer_check, rewards
from tests.fuzz.test_engine_answers import places_in

TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
USER = {"role": "user", "content": "one more"}
YES = {"role": "assistant", "content": [{"type": "text", "text": "yes"}], "step_loss_mask": 1}
NO = {"role": "assistant", "content": "no", "tool_calls": [{"function": {"name": "f"}}]}
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of a PromptSource, a row
    "text": ({}, {"input": "is it?", "label": "4", "metadata": {"tests": [{"stdin": "1"}]}}),
    "messages": ({}, {"input": [USER, YES, NO, USER], "label": "4", "tools": "[]"}),
    "conversation": ({"conversations": True}, {"input": [USER, NO, USER, YES], "tools": [{}]}),
    "pair": ({"pairs": True}, {"input": "is it?", "chosen": [YES], "rejected": [NO]}),
}
WORDS = st.text(st.characters(categories=None), max_size=8) | st.sampled_from(
    ["\x1b[2J", "a\r\nb", "\u202e", "\ud800", "x" * 3000, "", "assistant", "code"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.just(2**70) | WORDS
KEYS = st.sampled_from(["role", "content", "type", "text", "input", "tests", "rm_type"]) | WORDS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@functools.cache
def tokenizer() -> Any:
    made = make_tokenizer()
    made.chat_template = made.chat_template.replace("{% endfor %}", CALLS, 1)
    return made


@functools.cache
def folder() -> tuple[Any, Path]:
    holder = tempfile.TemporaryDirectory()
    return holder, Path(holder.name)


@st.composite
def mutated(draw: st.DrawFn, row: Any) -> Any:
    """A good row of which up to three places are replaced, removed or called otherwise."""
    row = copy.deepcopy(row)
    for place, key in places_in(row, draw):
        change = draw(st.sampled_from(["replace", "remove", "call otherwise"]))
        if change == "replace":
            place[key] = draw(JSON)
        else:
            value = place.pop(key)
            if change == "call otherwise" and isinstance(place, dict):
                place[draw(KEYS)] = value
    return row


def is_unfit(character: str) -> bool:
    """Of a control character, half a surrogate pair, or a change of the direction of writing."""
    return category(character) in ("Cc", "Cs", "Zl", "Zp") or bidirectional(character) in TURNS


def checked(refusal: ValueError) -> str:
    """What it says: one line of legible text with the file; UnicodeError and its like are none."""
    words = str(refusal)
    assert type(refusal) is ValueError, repr(refusal)
    assert not any(is_unfit(c) for c in words) and len(words) < 2000, words
    assert "rows.jsonl" in words
    return words


def sentence_of(content: bytes, form: str, *, chat: bool, reward: str | None = None) -> str | None:
    """Of a file that is refused; None where its prompts were made. Anything else is raised."""
    path = folder()[1] / "rows.jsonl"
    path.write_bytes(content)
    options = dict(FORMS[form][0])
    if not options:
        options["answer_check"] = answer_check(reward, None, from_metadata=True) if reward else None
    label = "label" if "label" in FORMS[form][1] else None
    config = DataConfig(prompt_data=str(path), apply_chat_template=chat, label_key=label)
    try:
        source = PromptSource(config, tokenizer(), **options)
        (prompt,) = source.next_prompts(1)
    except ValueError as refusal:
        return checked(refusal)
    assert prompt.tokens and all(type(token) is int for token in prompt.tokens)
    prompt.text.encode()
    return None


def line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


@pytest.mark.parametrize("form", FORMS)
def test_the_good_rows_are_read(form: str) -> None:
    assert sentence_of(line(FORMS[form][1]), form, chat=True) is None


def with_role(role: object) -> dict[str, Any]:
    return {"input": [{"role": role, "content": 7}], "label": "4"}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), chat=st.booleans())
def test_a_row_is_a_prompt_or_a_sentence(form: str, data: st.DataObject, chat: bool) -> None:
    row = data.draw(mutated(FORMS[form][1]) | JSON)
    sentence_of(line(row), form, chat=chat)


@given(role=WORDS | JSON)
@example("\x00user")
@example("\x1b]0;title\x07user")
@example("user\r\nFAKE line of a log")
@example("\u202eresu")
@example("x" * 100_000)
@example(["\x1b[2J"])
@example({"x" * 3000: "\ud800"})
def test_a_role_is_quoted_in_the_sentence(role: object) -> None:
    assert sentence_of(line(with_role(role)), "messages", chat=True) is not None


@pytest.mark.parametrize("reward", sorted(rewards.names()))
@given(row=mutated(FORMS["text"][1]))
def test_the_checks_of_rewards_take_any_row(reward: str, row: Any) -> None:
    sentence_of(line(row), "text", chat=False, reward=reward)


@given(st.binary(max_size=200) | st.integers(0, 2000).map(lambda n: b'{"input":' * n))
def test_bytes_are_rows_or_a_sentence(content: bytes) -> None:
    sentence_of(content, "text", chat=False)
