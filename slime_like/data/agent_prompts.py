"""Rows of agents, which write their own messages and get the row's: a text, perhaps with images, or
a list of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_like.data.chat_template import with_parts
from slime_like.data.messages import IMAGE_MARK
from slime_like.data.prompt_format import PromptFormat, row_message
from slime_like.data.row_images import TEXT_MARK
from slime_like.data.rows import Row
from slime_like.images.encoded import EncodedImage
from slime_like.types import PROMPT_MESSAGES, Prompt, Sample


class AgentPromptFormat(PromptFormat):
    """A text without images stays as it is. Others are rendered as an agent's first request with
    them would be, so that limits on prompts count their tokens."""

    def _renders(self, row: Row) -> bool:
        return super()._renders(row) or IMAGE_MARK in row[self.keys.input]

    def _metadata_of(self, row: Row) -> dict[str, object]:
        metadata = super()._metadata_of(row)
        if isinstance(row[self.keys.input], str):
            metadata.pop(PROMPT_MESSAGES, None)
        else:
            messages = [row_message(message) for message in row[self.keys.input]]
            metadata[PROMPT_MESSAGES] = [
                with_parts(m) if IMAGE_MARK in m["content"] else m for m in messages
            ]
        return metadata

    def prompt(self, group_id: int, row: Row, text: Any, tokens: tuple[int, ...]) -> Prompt:
        made = super().prompt(group_id, row, text, tokens)
        given = row[self.keys.input]
        if not isinstance(given, str):
            return made
        return replace(made, text=given.replace(IMAGE_MARK, TEXT_MARK))


def row_messages(sample: Sample) -> list[dict[str, Any]]:
    """The messages of a sample's row in the form of OpenAI's chat completions, with its images as
    data URLs. The row is of an `AgentPromptFormat`."""
    messages: Sequence[Mapping[str, Any]] | None = sample.metadata.get(PROMPT_MESSAGES)
    if messages is None:
        message = {"role": "user", "content": sample.text}
        if sample.images:
            marked = sample.text.replace(TEXT_MARK, IMAGE_MARK)
            message = with_parts({**message, "content": marked})
        messages = [message]
    rest = iter(sample.images)
    return [{**m, "content": _with_images(m["content"], rest)} for m in messages]


def _with_images(content: Any, rest: Iterator[EncodedImage]) -> Any:
    """The content of a message. rest: the images of its parts, and of later ones."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": next(rest).data_url}}
        if part["type"] == "image"
        else part
        for part in content
    ]


def question_of(message: Mapping[str, Any]) -> str:
    """The text of one of `row_messages`, with a mark for each image."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else TEXT_MARK for part in content)
