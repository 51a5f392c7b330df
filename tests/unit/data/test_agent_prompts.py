"""Rows for agents: what an agent gets of a row with images or messages, and what its prompt
counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arguments.schema.data import DataConfig
from slime_like.agents import live_episodes
from slime_like.agents.episode_samples import sample_of
from slime_like.agents.live_episodes import partial_sample, reset_episode
from slime_like.agents.messages import images_of
from slime_like.agents.sessions import messages_of
from slime_like.agents.task import Task
from slime_like.data.agent_prompts import question_of, row_messages
from slime_like.data.prompts import PromptSource
from slime_like.types import Prompt, Sample
from tests.unit.agents.test_images import BLUE, RED, template_of
from tests.vision import tiny_processor

TEXT = {"type": "text", "text": "What?"}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return tiny_processor(tmp_path_factory.mktemp("model"))


def prompt_of(folder: Path, parts: tuple[Any, Any], row: Row, **settings: Any) -> Prompt:
    tokenizer, processor = parts
    for name, image in (("red.png", RED), ("blue.png", BLUE)):
        (folder / name).write_bytes(image.data)
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = DataConfig(prompt_data=str(path), multimodal_keys={"image": "images"}, **settings)
    source = PromptSource(config, tokenizer, for_agents=True, image_processor=processor)
    return source.next_prompts(1)[0]


def url(image: Any) -> Row:
    return {"type": "image_url", "image_url": {"url": image.data_url}}


ROWS: dict[str, tuple[Row, list[Row], str]] = {
    "a text": ({"input": "What?"}, [{"role": "user", "content": "What?"}], "What?"),
    "a text with images": (
        {"input": "<image>or<image>?", "images": ["red.png", "blue.png"]},
        [{"role": "user", "content": [url(RED), {"type": "text", "text": "or"}, url(BLUE), {"type": "text", "text": "?"}]}],
        "<image>or<image>?",
    ),
    "messages": (
        {"input": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What?"}]},
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What?"}],
        "What?",
    ),
    "messages with images, and a mark that is none": (
        {
            "input": [
                {"role": "user", "content": "look: <image>"},
                {"role": "assistant", "content": "<image>"},
                {"role": "user", "content": [{"type": "image", "image": "blue.png"}, TEXT]},
            ],
            "images": ["red.png"],
        },
        [
            {"role": "user", "content": [{"type": "text", "text": "look: "}, url(RED)]},
            {"role": "assistant", "content": "<image>"},
            {"role": "user", "content": [url(BLUE), TEXT]},
        ],
        "<image>What?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_an_agent_gets_the_messages_of_its_row(
    tmp_path: Path, parts: tuple[Any, Any], kind: str
) -> None:
    """As it may send them to the gateway, which then counts the tokens that the run counted."""
    row, messages, question = ROWS[kind]
    prompt = prompt_of(tmp_path, parts, row)
    sample = Sample.empty(prompt, 3)
    assert row_messages(sample) == messages
    assert question_of(messages[-1]) == question
    asked = messages_of({"messages": messages})
    assert images_of(asked) == sample.images
    if kind == "a text":  # as ever
        assert prompt.tokens == tuple(parts[0]("What?", add_special_tokens=False)["input_ids"])
        assert prompt.text == "What?" and not prompt.metadata
    else:
        assert list(prompt.tokens) == template_of(parts).prompt(asked, None)
    task = Task(3, question, None, {}, False, "", "key", messages=messages)
    assert task.images == [image.data for image in sample.images]


def test_limits_count_the_tokens_of_images(tmp_path: Path, parts: tuple[Any, Any]) -> None:
    row = {"input": "<image>?", "images": ["red.png"]}
    with pytest.raises(ValueError, match=r"every prompt of --prompt-data .* is longer"):
        prompt_of(tmp_path, parts, row, rollout_max_prompt_len=8)


def test_a_wrong_number_of_images_names_the_row(tmp_path: Path, parts: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 1 images in 'images' .* and 0 places"):
        prompt_of(tmp_path, parts, {"input": "?", "images": ["red.png"]})


class Tree:
    turns: tuple[Any, ...] = ()
    counts: Mapping[str, int] = {}

    @staticmethod
    def branches() -> list[Any]:
        return [None]


class Session:
    tree = Tree
    aborted = False

    @staticmethod
    def numbers() -> dict[str, float]:
        return {}


class Engine:
    unfinished: tuple[Any, ...] = ()


def test_an_episode_that_starts_again_has_the_images_of_its_row(
    tmp_path: Path, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent, which had sent others, is gone; and one that is lost has none, since its tokens are
    those of the agent's prompt."""
    row = Sample.empty(prompt_of(tmp_path, parts, ROWS["a text with images"][0]), 3)
    answered = replace(row, tokens=torch.arange(9), response_length=2, images=(BLUE,))
    monkeypatch.setattr(live_episodes, "sequence", lambda *_: answered)
    paused = partial_sample(row, Session, Engine)  # type: ignore[arg-type]
    again = reset_episode(paused)
    assert row_messages(again) == row_messages(row)
    task = Task(3, "", None, {}, False, "", "key")
    lost = sample_of(again, task, Session, [], None, "it raised")  # type: ignore[arg-type]
    assert lost.images == () and lost.metadata["failure"] == "it raised"
