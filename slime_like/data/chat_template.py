"""Apply a tokenizer's chat template to canonical messages, in the form that the template takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_like.data.messages import ASSISTANT, IMAGE_MARK, Message, with_text_arguments
from slime_like.data.rendering import RowProblem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# For templates that render calls only if there is no content, as opposed to empty content.
# transformers drops keys without a value, so a marker stands for None, in the template as well.
_IS_NONE = re.compile(r"""(content(?:['"]\])?) is (not )?none""")
_NO_CONTENT = "<no content>"
_MARK = "a marked text"


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: With a chat template.
        arguments: Further arguments of the template (--apply-chat-template-kwargs).
        images: Whether contents may have images, `IMAGE_MARK`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, object] | None = None,
        *,
        images: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._written: set[object] = set()  # kinds of messages that the template is known to write
        self._takes_parts: bool | None = None
        self._images = images

    @property
    def continues_answer(self) -> bool:
        """Whether a last message of the assistant is a beginning to continue."""
        return bool(self._arguments.get("continue_final_message"))

    def render(
        self, messages: Sequence[Message], tools: object = None, *, open_turn: bool = False
    ) -> str:
        """The text of a conversation. open_turn: append the opening of the assistant's turn. Raises
        whatever the template raises."""
        template_source = self._tokenizer.chat_template
        template = template_source if isinstance(template_source, str) else ""
        roles = {} if "developer" in str(template_source) else {"developer": "system"}
        mapped = [{**m, "role": roles.get(m["role"], m["role"])} for m in messages]
        if _IS_NONE.search(template):
            marked = []
            for m in mapped:
                is_empty = bool(m.get("tool_calls")) and not m["content"]
                marked.append(m | {"content": _NO_CONTENT} if is_empty else m)
            source = _IS_NONE.sub(_compare_to_marker, template)
            text = self._apply(marked, tools, open_turn, chat_template=source)
            if _NO_CONTENT not in text:  # otherwise it tests other messages
                return text
        return self._apply(mapped, tools, open_turn)

    def check_written(
        self, messages: Sequence[Message], tools: object = None, *, start: int = 0
    ) -> None:
        """Check that the text depends on every message from `start` on: templates ignore roles,
        tools' results and calls that they do not know.

        Raises:
            RowProblem: Names the message that the template leaves out. Not raised for messages that
                the template refuses, which `render` reports.
        """
        text: str | None = None
        for index, message in enumerate(messages[start:], start):
            around = [m["role"] for m in messages[max(0, index - 1) : index + 2]]
            kind = (index == 0, *around, bool(message.get("tool_calls")))
            if kind in self._written:
                continue
            if text is None:
                try:
                    text = self.render(messages, tools, open_turn=False)
                except Exception:  # templates may raise anything
                    return
            if self._is_lost(messages, index, tools, text):
                what = "the tool calls" if message.get("tool_calls") else "the text"
                raise RowProblem(
                    f"message {index} ({message['role']}): the chat template does not write {what} "
                    "of such a message, which would be lost; use another role, or another template"
                )
            self._written.add(kind)

    def _is_lost(self, messages: Sequence[Message], index: int, tools: object, text: str) -> bool:
        """Whether a conversation with another message in place of this one has the same text."""
        other = [*messages[:index], _changed(messages[index]), *messages[index + 1 :]]
        try:
            return self.render(other, tools, open_turn=False) == text
        except Exception:  # templates may raise anything
            return False  # it reads the message

    def check_thoughts_written(self, messages: Sequence[Message], tools: object = None) -> None:
        """Check that the template writes the ``reasoning_content`` of the last message, an
        assistant's. Raises RowProblem."""
        last = messages[-1]
        if not last.get("reasoning_content") or "reasoning_content" in self._written:
            return
        text, other = (
            self.render([*messages[:-1], each], tools, open_turn=False)
            for each in (last, {**last, "reasoning_content": _MARK})
        )
        if text == other:
            raise RowProblem(
                f"message {len(messages) - 1} ({ASSISTANT}): the chat template does not write "
                "'reasoning_content', which would be lost; write it into the content, or remove it"
            )
        self._written.add("reasoning_content")

    def _apply(
        self, messages: Sequence[Message], tools: object, open_turn: bool, **extra: object
    ) -> str:
        options: dict[str, Any] = {"add_generation_prompt": open_turn, **extra}
        if tools:
            options["tools"] = tools
        if self.continues_answer:
            options["add_generation_prompt"] = False
        options |= self._arguments
        if not open_turn:
            options.pop("continue_final_message", None)
        needs_parts = self._needs_parts()
        messages = [
            with_parts(message)
            if needs_parts or (self._images and IMAGE_MARK in message["content"])
            else message
            for message in messages
        ]
        try:
            return self._call(messages, options)
        except TypeError:  # for templates that concatenate arguments as text
            return self._call([with_text_arguments(message) for message in messages], options)

    def _call(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return str(text)

    def _needs_parts(self) -> bool:
        """Whether the template reads contents as lists of parts alone, and would lose texts."""
        if self._takes_parts is None:
            message = {"role": "user", "content": _MARK}
            as_text, as_parts = (self._probe(each) for each in (message, with_parts(message)))
            self._takes_parts = _MARK not in as_text and _MARK in as_parts
        return self._takes_parts

    def _probe(self, message: Message) -> str:
        """The text of one message; "" if the template does not take it."""
        try:
            return self._call([message], {})
        except Exception:  # templates may raise anything
            return ""


def _compare_to_marker(match: re.Match[str]) -> str:
    return f"{match[1]} {'!=' if match[2] else '=='} '{_NO_CONTENT}'"


def with_parts(message: Message) -> dict[str, Any]:
    """The message with its content as a list of parts."""
    texts = message["content"].split(IMAGE_MARK)
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if text or len(texts) == 1:
            parts.append({"type": "text", "text": text})
    return {key: v for key, v in message.items() if key != "images"} | {"content": parts}


def _changed(message: Message) -> dict[str, Any]:
    """The message with a longer text, or another function in its first call."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": f"{message['content']} {_MARK}"}
    first = {**calls[0], "function": {**calls[0]["function"], "name": _MARK}}
    return {**message, "tool_calls": [first, *calls[1:]]}
