"""Conversations to learn from: which of their tokens are the assistant's, against masks made by
hand, for templates that change earlier turns and for those that do not."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from arguments.schema.data import DataConfig
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.data.prompts import PromptSource
from slime_like.data.rendering import RowProblem
from slime_like.data.sft import sft_samples
from slime_like.data.turns import Render, split_trained_turns
from slime_like.types import Sample, SampleStatus
from tests import agent_templates
from tests.agent_templates import FAMILIES

USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + OPENING
)
# As Qwen3's: thoughts of turns before the last question are taken out, and an empty thought is
# written into the last turn; tool results are parts of one user's turn.
THINKING = (
    "{% set ns = namespace(last=messages|length - 1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<result>{{ m.content }}</result>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last and (loop.last or '</think>' in m.content) %}<think>\n"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "\n</think>\n\n{% endif %}{{ answer }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + OPENING
)
# As Qwen3.5's, and DeepSeek's distilled ones: the opening of a turn is the beginning of a thought.
OPENS_A_THOUGHT = THINKING.replace(OPENING, OPENING.replace("ant\n", "ant\n<think>\n"))
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}"
OPENED = OPENING.replace("ant\n", "ant\n<think>\n")
# As Qwen3.5's: thoughts under their own key too, a thought in every turn after the last question,
# and no conversation without one.
REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if ns.last == -1 %}{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% set content = m.content %}{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + OPENING
)
FORGETS = (
    "{{ messages|length }}{% for m in messages[-2:] %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
TURNS = [
    ("system", "be short"),
    ("user", "a"),
    ("assistant", "<think>\nhm\n</think>\n\nfirst"),
    ("tool", "1"),
    ("tool", "2"),
    ("assistant", "second"),
    ("user", "b"),
    ("assistant", "<think>\nso\n</think>\n\nthird"),
]
THOUGHT, EMPTY = "<think>\n{}\n</think>\n\n", "<think>\n\n</think>\n\n"
TOOLS = f"{USER[:-1]}\n<result>1</result>\n<result>2</result><|im_end|>\n"
HEAD = f"<|im_start|>system\nbe short<|im_end|>\n{USER}a<|im_end|>\n{ASSISTANT}"


def messages(turns: Sequence[tuple[str, str]], **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more} for role, content in turns]


def source(folder: Path, template: str, *rows: dict[str, Any], **flags: Any) -> PromptSource:
    tokenizer = make_tokenizer()
    # a newline after a block is none in a chat template
    tokenizer.chat_template = template.replace("%}\n", "%}{{ '\\n' }}")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(prompt_data=str(path), input_key="messages", **flags)
    return PromptSource(config, tokenizer, conversations=True)


def learn(folder: Path, template: str, row: Any, limit: int | None = None, **flags: Any) -> Sample:
    prompts = source(folder, template, {"messages": row}, **flags).next_prompts(1)
    return sft_samples(prompts, make_tokenizer(), max_response_len=limit)[0]


def by_hand(*parts: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """Tokens of a whole sample, and the mask of what follows the first part."""
    tokenizer = make_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    mask = [learnt for i, (_, learnt) in zip(ids[1:], parts[1:]) for _ in i]
    return [token for part in ids for token in part], mask


def same(sample: Sample, *parts: tuple[str, bool]) -> None:
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == by_hand(*parts)
    assert sample.response_length == len(sample.loss_mask)


def test_every_turn_of_the_assistant_is_learnt_and_nothing_else(tmp_path: Path) -> None:
    rows = messages([("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")])
    sample = learn(tmp_path, CHATML, [*rows, {"role": "user", "content": "unanswered"}])
    same(
        sample,
        (f"{USER}a<|im_end|>\n{ASSISTANT}", False), ("one<|im_end|>\n", True),
        (f"{USER}b<|im_end|>\n{ASSISTANT}", False), ("two<|im_end|>\n", True),
    )  # fmt: skip
    assert sample.status == SampleStatus.COMPLETED


@pytest.mark.parametrize("mask_type", ["qwen", "qwen3", "qwen3_5"])
def test_the_types_are_one_where_no_turn_is_changed(tmp_path: Path, mask_type: str) -> None:
    rows = messages([("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")])
    plain, other = (
        learn(tmp_path, CHATML, rows, loss_mask_type=kind) for kind in (None, mask_type)
    )
    assert other.tokens.equal(plain.tokens) and other.loss_mask.equal(plain.loss_mask)


def test_a_turn_can_be_left_out_and_a_conversation_cut(tmp_path: Path) -> None:
    rows = messages([("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")])
    rows[1]["step_loss_mask"] = 0
    context = f"{USER}a<|im_end|>\n{ASSISTANT}one<|im_end|>\n{USER}b<|im_end|>\n{ASSISTANT}"
    same(learn(tmp_path, CHATML, rows), (context, False), ("two<|im_end|>\n", True))
    full = learn(tmp_path, CHATML, rows)
    cut = learn(tmp_path, CHATML, rows, limit=2)
    assert cut.tokens.equal(full.tokens[: full.prompt_length + 2])
    assert (cut.response_length, cut.status) == (2, SampleStatus.TRUNCATED)


def test_tools_reach_the_template_and_the_metadata(tmp_path: Path) -> None:
    rows = messages([("user", "a"), ("assistant", "one")])
    tools = [{"name": "look"}]
    found = [
        source(tmp_path, CHATML, {"messages": rows, "tools": value}).next_prompts(1)[0]
        for value in (tools, json.dumps(tools))
    ]
    assert found[0] == found[1] and found[0].metadata["tools"] == tools
    assert found[0].text.startswith('<|im_start|>tools\n[{"name": "look"}]<|im_end|>\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'tools' \(--tool-key\) must be a list"):
        source(tmp_path, CHATML, {"messages": rows, "tools": {}})


@pytest.mark.parametrize("template", [THINKING, OPENS_A_THOUGHT])
def test_thoughts_that_the_whole_conversation_does_not_have(tmp_path: Path, template: str) -> None:
    """qwen3_5: as the template writes the conversation; of the last turn the opening is given."""
    given = "<think>\n" if template is OPENS_A_THOUGHT else ""
    last = THOUGHT.format("so").removeprefix(given)
    same(
        learn(tmp_path, template, messages(TURNS), loss_mask_type="qwen3_5"),
        (HEAD, False), ("first<|im_end|>\n", True),
        (f"{TOOLS}{ASSISTANT}", False), ("second<|im_end|>\n", True),
        (f"{USER}b<|im_end|>\n{ASSISTANT}{given}", False), (f"{last}third<|im_end|>\n", True),
    )  # fmt: skip


def test_every_turn_as_it_was_when_it_was_the_last(tmp_path: Path) -> None:
    same(
        learn(tmp_path, THINKING, messages(TURNS), loss_mask_type="qwen3"),
        (HEAD, False), (f"{THOUGHT.format('hm')}first<|im_end|>\n", True),
        (f"{TOOLS}{ASSISTANT}", False), (f"{EMPTY}second<|im_end|>\n", True),
        (f"{USER}b<|im_end|>\n{ASSISTANT}", False), (f"{THOUGHT.format('so')}third<|im_end|>\n", True),
    )  # fmt: skip


def test_every_turn_alone(tmp_path: Path) -> None:
    """As slime's default type: no thoughts, as a turn without a question has none there."""
    same(
        learn(tmp_path, THINKING, messages(TURNS), loss_mask_type="qwen"),
        (HEAD, False), ("first<|im_end|>\n", True),
        (f"{TOOLS}{ASSISTANT}", False), ("second<|im_end|>\n", True),
        (f"{USER}b<|im_end|>\n{ASSISTANT}", False), ("third<|im_end|>\n", True),
    )  # fmt: skip


def test_a_turn_is_learnt_after_the_opening_under_which_it_is_sampled(tmp_path: Path) -> None:
    """The conversation has no thoughts in earlier turns, and so no openings of them either."""
    thought = f"{ASSISTANT}<think>\n"
    same(
        learn(tmp_path, OPENS_A_THOUGHT, messages(TURNS), loss_mask_type="qwen3"),
        (f"{HEAD}<think>\n", False), ("hm\n</think>\n\nfirst<|im_end|>\n", True),
        (f"{TOOLS}{thought}", False), ("\n</think>\n\nsecond<|im_end|>\n", True),
        (f"{USER}b<|im_end|>\n{thought}", False), ("so\n</think>\n\nthird<|im_end|>\n", True),
    )  # fmt: skip


@functools.cache
def renders() -> dict[str, Render]:
    """Every template that the tests have, of sixteen families and of this file."""
    tokenizers = {name: agent_templates.make_tokenizer(f) for name, f in FAMILIES.items()}
    for name, template in (
        ("a chatml", CHATML),
        ("a thinking", THINKING),
        ("an opened thought", OPENS_A_THOUGHT),
        ("a reasoning", REASONING),
        ("an opened reasoning", REASONING.replace(OPENING, OPENED)),
        ("a system message", SYSTEM + CHATML),
    ):
        tokenizers[name] = make_tokenizer()
        tokenizers[name].chat_template = template.replace("%}\n", "%}{{ '\\n' }}")

    def of(tokenizer: Any) -> Render:
        def render(messages: Sequence[Any], *, open_turn: bool = False) -> str:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn
            )
            return str(text)

        return render

    return {name: of(tokenizer) for name, tokenizer in tokenizers.items()}


QUESTION = {"role": "user", "content": "a question"}
INLINE = messages([turn for turn in TURNS if turn[0] in ("user", "assistant")])
APART: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "first", "reasoning_content": "hm"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "second", "reasoning_content": "so"},
]
PLAIN = messages([("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")])


def subtracted(render: Render, conversation: list[dict[str, Any]], mask_type: str | None) -> Any:
    """Per trained turn what is sampled, and the end of the prompt under which it is: the text of
    the conversation up to it minus the same with the turn opened."""
    found = []
    for index, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = conversation[:index]
        closed, prompt = render(before), render(before, open_turn=True)
        opening = prompt.removeprefix(closed) if prompt.startswith(closed) else ""
        if mask_type == "qwen3":
            before, prompt = [QUESTION], render([QUESTION], open_turn=True)
        ended = render([*before, message])
        assert ended.startswith(prompt)
        found.append((opening, ended.removeprefix(prompt)))
    return found


@pytest.mark.parametrize("conversation", [INLINE, APART, PLAIN], ids=["inline", "apart", "plain"])
@pytest.mark.parametrize("mask_type", [None, "qwen3", "distill_qwen"])
@pytest.mark.parametrize("name", renders())
def test_what_is_learnt_is_what_the_template_would_have_sampled(
    name: str, mask_type: str | None, conversation: list[dict[str, Any]]
) -> None:
    render = renders()[name]
    try:
        parts = split_trained_turns(render, conversation, mask_type, end="")
    except RowProblem:
        return  # see test_how_many_types_each_template_takes
    texts = [part.text for part in parts]
    assert [part.trained for part in parts] == [False, True] * (len(parts) // 2)
    if mask_type == "distill_qwen":  # the content alone, and no end of the turn
        assert texts[0] == render(conversation[:-1], open_turn=True)
        assert conversation[-1]["content"].removeprefix("<think>\n") in (
            texts[1], texts[1].removeprefix("<think>\n"),
        )  # fmt: skip
        opened = texts[0].rstrip().endswith("<think>")
        assert opened + texts[1].count("<think>") == texts[1].count("</think>")
        return
    wanted = subtracted(render, conversation, mask_type)
    assert len(wanted) == len(texts[1::2])
    for (opening, text), context, learnt in zip(wanted, texts[::2], texts[1::2]):
        assert context.endswith(opening)
        assert learnt == text
        assert (opening + learnt).count("<think>") == learnt.count("</think>")


@pytest.mark.parametrize("conversation", [INLINE, APART, PLAIN], ids=["inline", "apart", "plain"])
@pytest.mark.parametrize("name", renders())
def test_of_the_whole_conversation_every_part_is_its_own_text(
    name: str, conversation: list[dict[str, Any]]
) -> None:
    render = renders()[name]
    parts = split_trained_turns(render, conversation, "qwen3_5")
    assert "".join(part.text for part in parts) == render(conversation)
    assert len(parts) == 2 * sum(message["role"] == "assistant" for message in conversation)


def test_how_many_types_each_template_takes() -> None:
    """That the two tests above are about something: only these are refused."""
    refused = set()
    for name, render in renders().items():
        for kind in (None, "qwen", "qwen3", "qwen3_5", "distill_qwen"):
            for conversation in (INLINE, APART, PLAIN):
                with contextlib.suppress(RowProblem):
                    split_trained_turns(render, conversation, kind)
                    break
            else:
                refused.add((name, kind))
    assert refused == {
        ("qwen3", None), ("qwen3", "qwen3"), ("qwen3", "qwen"),
        ("qwen3_open_thought", None), ("qwen3_open_thought", "qwen3"), ("qwen3_open_thought", "qwen"),
        ("a thinking", None), ("an opened thought", None), ("an opened thought", "qwen"),
        ("a reasoning", None), ("a reasoning", "qwen"),
        ("an opened reasoning", None), ("an opened reasoning", "qwen"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"content": "42"}, r"opens a thought \(<think>\), which the answer does not end"),
        ({"content": "42", "reasoning_content": "six by seven"}, "has 'reasoning_content'"),
        ({"content": "42", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "has 'tool_calls'"),
    ],
)  # fmt: skip
def test_of_the_last_answer_nothing_is_lost(
    tmp_path: Path, last: dict[str, Any], words: str
) -> None:
    row = [{"role": "user", "content": "a"}, {"role": "assistant", **last}]
    with pytest.raises(ValueError, match=f"rows.jsonl:1: .*{words}"):
        source(tmp_path, OPENS_A_THOUGHT, {"messages": row}, loss_mask_type="distill_qwen")


@pytest.mark.parametrize("pairs", [False, True])
def test_labels_continue_the_thought_that_the_template_opens(tmp_path: Path, pairs: bool) -> None:
    """An answer without one would be learnt as a thought without an end."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = OPENS_A_THOUGHT.replace("%}\n", "%}{{ '\\n' }}")
    path = tmp_path / "rows.jsonl"
    keys: dict[str, Any] = {"label_key": "chosen"}
    how: dict[str, Any] = {"pairs": True} if pairs else {"trains_labels": True}
    config = DataConfig(prompt_data=str(path), apply_chat_template=True, **({} if pairs else keys))

    def prompt(answer: str) -> Any:
        path.write_text(json.dumps({"input": "a", "chosen": answer, "rejected": "</think>no"}))
        return PromptSource(config, tokenizer, **how).next_prompts(1)[0]

    assert prompt("<think>\nhm\n</think>\n\n42").label == "hm\n</think>\n\n42"
    assert prompt("hm\n</think>\n\n42").label == "hm\n</think>\n\n42"
    assert prompt("\n</think>\n\n42").text.endswith(f"{ASSISTANT}<think>\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template opens a thought"):
        prompt("42")


def test_a_system_message_that_the_template_adds_is_in_no_turn(tmp_path: Path) -> None:
    template = SYSTEM
    rows = messages([("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")])
    for mask_type in ("qwen", "qwen3", None):
        same(
            learn(tmp_path, template + CHATML, rows, loss_mask_type=mask_type),
            (f"<|im_start|>system\nhelp<|im_end|>\n{USER}a<|im_end|>\n{ASSISTANT}", False),
            ("one<|im_end|>\n", True),
            (f"{USER}b<|im_end|>\n{ASSISTANT}", False), ("two<|im_end|>\n", True),
        )  # fmt: skip


def test_the_last_answer_as_it_stands(tmp_path: Path) -> None:
    end = make_tokenizer().eos_token
    same(
        learn(tmp_path, OPENS_A_THOUGHT, messages(TURNS), loss_mask_type="distill_qwen"),
        (
            f"{HEAD}first<|im_end|>\n{TOOLS}{ASSISTANT}second<|im_end|>\n{USER}b<|im_end|>\n{ASSISTANT}<think>\n",
            False,
        ),
        (f"so\n</think>\n\nthird{end}", True),
    )


def test_a_template_that_changes_earlier_turns_is_refused_with_its_row(tmp_path: Path) -> None:
    single = {"messages": messages([("user", "a"), ("assistant", "one")])}
    words = r"rows.jsonl:2: message 2 \(assistant\): the chat template writes this turn otherwise"
    with pytest.raises(ValueError, match=words) as caught:
        source(tmp_path, THINKING, single, {"messages": messages(TURNS)})
    assert "--loss-mask-type: qwen3 " in str(caught.value)


@pytest.mark.parametrize(
    ("template", "mask_type"),
    [(FORGETS, "qwen3_5"), (FORGETS, "qwen3"), (OPENS_A_THOUGHT, "qwen")],
)
def test_no_mask_is_guessed(tmp_path: Path, template: str, mask_type: str) -> None:
    words = (
        r"rows.jsonl:1: message \d: the chat template's texts of this conversation and of its parts"
    )
    with pytest.raises(ValueError, match=words):
        source(tmp_path, template, {"messages": messages(TURNS)}, loss_mask_type=mask_type)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", "is a string; --loss-type sft_loss without --label-key"),
        ([], "must be a string or a list of messages"),
        (messages([("assistant", "a")]), "the first message is an assistant's"),
        (messages([("user", "a")]), "there is no turn of an assistant to learn"),
        (messages([("user", "a"), ("assistant", "b")], step_loss_mask=0), "there is no turn"),
        (messages([("user", "a"), ("assistant", "b")], step_loss_mask=2), "legal: 0 and 1"),
    ],
)
def test_rows_that_are_no_conversations(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'messages' \(--input-key\)") as caught:
        source(tmp_path, CHATML, {"messages": value})
    assert words in str(caught.value)


def test_a_tokenizer_without_a_template_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--input-key: the tokenizer has no chat template"):
        source(tmp_path, "", {"messages": messages(TURNS)})
