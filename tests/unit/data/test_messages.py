"""Messages of a chat in every spelling: rows of data and requests of agents become the same text, and
nothing of them is lost without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.schema.data import DataConfig
from slime_like.agents.messages import canonical as of_request
from slime_like.agents.templates import ChatTemplate
from slime_like.cli.tiny_model import make_tokenizer as tiny_tokenizer
from slime_like.data.messages import MessageProblem, canonical
from slime_like.data.prompts import PromptSource
from tests.agent_templates import FAMILIES, make_tokenizer

ARGUMENTS = {"city": "Zürich", "days": 2}
CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SPELLINGS: dict[str, dict[str, Any]] = {
    "canonical": CALLED,
    "no content": {"role": "assistant", "tool_calls": [CALL]},
    "null content": {**CALLED, "content": None, "refusal": None, "name": None},
    "arguments as text": {
        **CALLED,
        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}],
    },
    "without function": {
        **CALLED, "tool_calls": [{"id": "123456789", "name": "f", "arguments": ARGUMENTS}],
    },
}  # fmt: skip
QUESTION = {"role": "user", "content": "the weather?"}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "123456789", "name": "f"}
WRITES_ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# as many: a role that is none of these is left out
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def source(folder: Path, template: str, row: Any, **how: Any) -> PromptSource:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"input": row}))
    names = ("conversations", "pairs")
    kind = {name: how.pop(name) for name in names if name in how}
    config = DataConfig(prompt_data=str(path), apply_chat_template=True, **how)
    return PromptSource(config, tokenizer, **kind)


def text(folder: Path, template: str, row: Any, **how: Any) -> str:
    (prompt,) = source(folder, template, row, **how).next_prompts(1)
    return prompt.text + "".join(part for part, _ in prompt.turns)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_call_in_every_spelling_is_one(spelling: str) -> None:
    assert canonical(SPELLINGS[spelling]) == CALLED == of_request(SPELLINGS[spelling], 0)


def test_the_older_form_of_a_call() -> None:
    function = {"name": "f", "arguments": json.dumps(ARGUMENTS)}
    old = {"role": "assistant", "content": None, "function_call": function}
    assert canonical(old) == {**CALLED, "tool_calls": [{**CALL, "id": ""}]}
    result = {"role": "function", "name": "f", "content": "sunny"}
    assert canonical(result, roles=None) == {"role": "tool", "name": "f", "content": "sunny"}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_prompt_that_an_agent_would_have(
    tmp_path: Path, family: str, spelling: str
) -> None:
    """Of sixteen families of templates, some of which take arguments as text alone."""
    tokenizer = make_tokenizer(FAMILIES[family])
    path = tmp_path / "rows.jsonl"
    conversation = [QUESTION, SPELLINGS[spelling], RESULT]
    path.write_text(json.dumps({"input": conversation}))
    config = DataConfig(prompt_data=str(path), apply_chat_template=True)
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    wanted = template.prompt([of_request(m, i) for i, m in enumerate(conversation)], None)
    (prompt,) = PromptSource(config, tokenizer).next_prompts(1)
    assert list(prompt.tokens) == wanted
    assert prompt.text.count("Zürich") == 1 and '\\"' not in prompt.text


def test_a_developers_message_is_a_systems_where_the_template_knows_none(tmp_path: Path) -> None:
    row = [{"role": "developer", "content": "be short"}, QUESTION]
    assert text(tmp_path, KNOWN_ROLES, row) == "<system>be short<user>the weather?<assistant>"
    known = KNOWN_ROLES.replace("'tool'", "'developer'")
    assert text(tmp_path, known, row) == "<developer>be short<user>the weather?<assistant>"


@pytest.mark.parametrize("how", [{}, {"conversations": True}])
def test_a_role_that_the_template_leaves_out_is_named(tmp_path: Path, how: Any) -> None:
    row = [QUESTION, {"role": "observation", "content": "sunny"}]
    row += [{"role": "assistant", "content": "sun"}] if how else []
    words = r"rows.jsonl:1: message 1 \(observation\): the chat template does not write the text"
    with pytest.raises(ValueError, match=words):
        source(tmp_path, KNOWN_ROLES, row, **how)
    assert "<observation>sunny" in text(tmp_path, WRITES_ALL, row, **how)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_calls_that_the_template_leaves_out_are_named(tmp_path: Path, spelling: str) -> None:
    row = [QUESTION, SPELLINGS[spelling], RESULT]
    with pytest.raises(ValueError, match=r"message 1 \(assistant\): .* not write the tool calls"):
        source(tmp_path, KNOWN_ROLES, row)
    wanted = '<user>the weather?<assistant>[f:{"city": "Zürich", "days": 2}]<tool>sunny<assistant>'
    assert text(tmp_path, WRITES_ALL, row) == wanted


def test_thoughts_that_the_template_leaves_out_are_named(tmp_path: Path) -> None:
    row = [QUESTION, {"role": "assistant", "content": "sun", "reasoning": "hm"}]
    with pytest.raises(ValueError, match=r"message 1 .* does not write 'reasoning_content'"):
        source(tmp_path, WRITES_ALL, row, conversations=True)
    thinking = WRITES_ALL.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    assert text(tmp_path, thinking, row, conversations=True).endswith("<assistant>hmsun")


def test_texts_reach_a_template_that_takes_parts_alone(tmp_path: Path) -> None:
    for row in ("the weather?", [QUESTION], [{"role": "user", "content": [{"type": "text", "text": "the weather?"}]}]):  # fmt: skip
        for template in (PARTS_ALONE, WRITES_ALL):
            assert text(tmp_path, template, row) == "<user>the weather?<assistant>"


IMAGES: list[dict[str, Any]] = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "https://a.test/a.png"}},
    {"type": "input_audio", "input_audio": {}},
    {"type": "video", "video": "a.mp4"},
]


@pytest.mark.parametrize("part", IMAGES, ids=lambda part: part["type"])
@pytest.mark.parametrize("how", [{}, {"conversations": True}])
def test_images_are_refused_with_their_row(tmp_path: Path, how: Any, part: dict[str, Any]) -> None:
    """Also where the template knows them and writes a placeholder, which no image would fill."""
    row = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
    row += [{"role": "assistant", "content": "sun"}] if how else []
    knows = PARTS_ALONE.replace(
        "{% endif %}{% endfor %}{% endfor %}",
        "{% else %}<image>{% endif %}{% endfor %}{% endfor %}",
    )
    words = rf"rows.jsonl:1: 'input' \(--input-key\): message 0 \(user\): a part of type '{part['type']}'"
    for template in (knows, WRITES_ALL):
        with pytest.raises(ValueError, match=words):
            source(tmp_path, template, row, **how)


def test_openais_weight_leaves_a_turn_out(tmp_path: Path) -> None:
    def learnt(**keys: Any) -> list[str]:
        row = [QUESTION, {"role": "assistant", "content": "sun", **keys}]
        row += [QUESTION, {"role": "assistant", "content": "rain"}]
        (prompt,) = source(tmp_path, WRITES_ALL, row, conversations=True).next_prompts(1)
        return [part for part, trained in prompt.turns if trained]

    assert learnt(weight=0) == learnt(step_loss_mask=0) == ["rain"]
    assert learnt(weight=1) == learnt(weight=None) == ["sun", "rain"]
    with pytest.raises(ValueError, match=r"message 1: 'weight' is 0\.5; legal: 0 and 1"):
        learnt(weight=0.5)
    with pytest.raises(ValueError, match="message 1: step_loss_mask and weight contradict"):
        learnt(weight=0, step_loss_mask=1)


def test_a_prompt_ends_before_the_answer(tmp_path: Path) -> None:
    row = [QUESTION, {"role": "assistant", "content": "It is"}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'input' .* ends with an assistant's turn"):
        source(tmp_path, WRITES_ALL, row)
    how = {"apply_chat_template_kwargs": {"continue_final_message": True}}
    assert text(tmp_path, WRITES_ALL, row, **how) == "<user>the weather?<assistant>It is"


@pytest.mark.parametrize("message", [3, {}, {"role": 3}, {"role": "user", "content": {}}])
def test_what_is_no_message(message: Any) -> None:
    with pytest.raises(MessageProblem):
        canonical(message)
