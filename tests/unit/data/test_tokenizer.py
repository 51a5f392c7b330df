"""Tokenizers and chat templates that are missing, broken, another model's or endless: a sentence
with folder or row, before a model is built."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from arguments.eval_sets import EvalSet
from arguments.prompt_mix import MixSource
from arguments.schema.data import DataConfig
from slime_like.cli.tiny_model import make_tokenizer
from slime_like.data.prompt_format import Room
from slime_like.data.prompts import PromptSource, load_eval_sets
from slime_like.data.rendering import render_rows
from slime_like.data.tokenizer import load_tokenizer, tokenizer_identity


def prompts(path: Path, rows: list[Any]) -> DataConfig:
    path.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    return DataConfig(prompt_data=str(path), apply_chat_template=True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only one turn') }}", "raised TemplateError: only one turn"),
        ("{{ messages[0].nothing.more }}", "raised UndefinedError"),
        ("{{ 1 / 0 }}", "raised ZeroDivisionError"),
        ("{{ messages[0]['content'] + 1 }}", "raised TypeError"),
        ("{% for x in %}", "raised TemplateSyntaxError"),
        (
            "{{ messages[0].content }}{{ '\\ud800' }}",
            "wrote half of a surrogate pair at character 1",
        ),
        ("{{ messages[0].content }}{{ 'ab ' * 2**25 }}", "wrote 100663297 characters"),
    ],
)
def test_a_template_that_raises_names_the_row(tmp_path: Path, template: str, words: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    config = prompts(tmp_path / "p.jsonl", ["a", "b"])
    with pytest.raises(ValueError) as caught:
        PromptSource(config, tokenizer)
    assert str(caught.value).startswith(f"{tmp_path}/p.jsonl:1: the chat template {words}")
    assert "remove --apply-chat-template" in str(caught.value)


def test_a_row_that_the_template_refuses_is_found_before_its_turn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'odd' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    config = prompts(tmp_path / "p.jsonl", ["a"] * 30 + ["odd"])
    with pytest.raises(ValueError, match=r"p.jsonl:31: the chat template raised TemplateError: no"):
        PromptSource(config, tokenizer)


def test_a_template_that_never_ends_is_stopped() -> None:
    """The thread ends too: it would take a processor from the run."""
    turns = [0]

    def render(prompt: int) -> str:
        while prompt:
            turns[0] += 1
        return "text"

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match=r"^row 2: the chat template has not ended after 0.5 s"):
        render_rows(render, [0, 0, 1, 0], lambda row: f"row {row}", limit_s=0.5)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_many_slow_rows_are_no_endless_one() -> None:
    def render(prompt: int) -> str:
        time.sleep(0.05)
        return str(prompt)

    texts = render_rows(render, range(10), str, limit_s=0.2)
    assert texts == [str(row) for row in range(10)]


def test_a_prompt_that_is_too_long_is_named_with_the_remedy(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    config = prompts(tmp_path / "p.jsonl", ["a", "b" * 40, "c"])
    with pytest.raises(ValueError) as caught:
        PromptSource(config, tokenizer, room=Room(positions=32, response=8))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/p.jsonl:2: the prompt has ")
    assert "with a response of 8 exceed the model's 32 positions" in text
    assert text.endswith("--rollout-max-prompt-len 24 drops such prompts")
    own = EvalSet("mine", config.prompt_data or "", max_response_len=40)
    with pytest.raises(ValueError, match=r"; lower mine's max_response_len \(--eval-max-resp"):
        load_eval_sets(
            [own], config, tokenizer, room_of=lambda each: Room(32, each.max_response_len or 0)
        )
    source = MixSource("mine", config.prompt_data or "", max_response_len=40)
    assert str(Room(32, 40).of(source).problem(1)).endswith("; lower mine's max_response_len")
    short = DataConfig(
        prompt_data=config.prompt_data, apply_chat_template=True, rollout_max_prompt_len=24
    )
    assert len(PromptSource(short, tokenizer, room=Room(positions=32, response=8))) == 2


def save_tokenizer(folder: Path) -> Path:
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", ["none", "empty", "garbage", "truncated", "other kind"])
def test_a_tokenizer_that_cannot_be_loaded_names_its_folder(tmp_path: Path, damage: str) -> None:
    folder = save_tokenizer(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = path.read_text()
    if damage == "none":
        for file in folder.iterdir():
            file.unlink()
    else:
        texts = {"empty": "", "garbage": "{{{", "truncated": content[:99], "other kind": "[1]"}
        path.write_text(texts[damage])
    with pytest.raises(ValueError) as caught:
        load_tokenizer(str(folder), vocab_size=None, trust_remote_code=False)
    assert str(caught.value).startswith(f"--hf-checkpoint {folder}: ")
    assert "copy the model's tokenizer files" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")
    size = len(make_tokenizer())
    assert len(load_tokenizer(str(folder), vocab_size=size, trust_remote_code=False)) == size
    with pytest.raises(ValueError, match=rf"has {size} tokens and the model {size - 1}, "):
        load_tokenizer(str(folder), vocab_size=size - 1, trust_remote_code=False)


def test_tokenizers_are_distinguished() -> None:
    ours = tokenizer_identity(make_tokenizer())
    assert tokenizer_identity(make_tokenizer()) == ours
    other = make_tokenizer()
    other.chat_template = "{{ messages }}"
    changed = tokenizer_identity(other)
    assert [name for name in ours if changed[name] != ours[name]] == ["chat template"]
    other = make_tokenizer()
    other.add_tokens(["<new>"])
    assert tokenizer_identity(other)["vocabulary"] != ours["vocabulary"]
    other = make_tokenizer()
    other.eos_token = other.pad_token
    assert tokenizer_identity(other)["special tokens"] != ours["special tokens"]
