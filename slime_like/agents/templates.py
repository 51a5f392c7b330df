"""A tokenizer's chat template in a growing conversation: the first prompt, and the text between a
generated answer, whose tokens are kept, and the next one.

That text is found by comparing rendered texts, as in `data/turns.py`: the conversation is rendered
twice with different placeholders for the answer, and the common suffix of both follows the answer.
The end of the answer's turn is removed from it if the model generated it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_like.agents.messages import BadRequest, ContextExceeded, images_of
from slime_like.data.chat_template import ChatRenderer
from slime_like.data.messages import Message
from slime_like.data.rendering import RowProblem
from slime_like.images.files import ImageProblem
from slime_like.images.processor import ImageProcessor
from slime_like.text import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WORDS = ("0", "1")  # placeholders for a completion's text


class ChatTemplate:
    """Renders and tokenises conversations with a tokenizer's chat template. end_ids: tokens that
    end a response."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Collection[int],
        arguments: Mapping[str, object] | None = None,
        *,
        max_characters: int | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        """
        Args:
            tokenizer: Hugging Face tokenizer with a chat template.
            end_ids: Tokens that end a response, including those of the tokenizer.
            arguments: Further arguments of the template (--apply-chat-template-kwargs).
            max_characters: Of a text that is tokenised; None: unlimited.
            processor: Of the model's images; None: messages have none.

        Raises:
            ValueError: The tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("agents need a chat template, and the tokenizer has none")
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self._renderer = ChatRenderer(tokenizer, arguments, images=processor is not None)
        self._processor = processor
        self._max_characters = max_characters
        self._ends = [tokenizer.decode([i], skip_special_tokens=False) for i in self.end_ids]

    def encode(self, text: str) -> list[int]:
        """Tokenise a text that already contains its special tokens. Surrogate characters, which no
        tokenizer takes, are replaced. Raises ContextExceeded for a text that is far too long: to
        count its tokens would hold up all episodes."""
        if self._max_characters is not None and len(text) > self._max_characters:
            raise ContextExceeded(
                f"context_length_exceeded: the conversation has {len(text)} characters, more than "
                f"{self._max_characters}"
            )
        text = text.encode(errors="replace").decode()
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """`encode`, with the placeholders of the messages' images. Raises BadRequest for an image
        that cannot be used, or a text that holds a placeholder itself."""
        images = images_of(messages)
        processor = self._processor
        if processor is None:
            if images:
                raise BadRequest("images need a run with --multimodal-keys")
            return self.encode(text)
        ids = self.encode(processor.written(text))
        if ids.count(processor.rule.image_token) != len(images):
            raise BadRequest(
                f"the conversation has {len(images)} images, and its text "
                f"{ids.count(processor.rule.image_token)} placeholders {processor.image_text}"
            )
        try:
            return processor.expand(ids, processor.token_counts(images))
        except ImageProblem as problem:
            raise BadRequest(f"an image of the conversation: {problem}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, including special ones."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))

    def prompt(self, messages: Sequence[Message], tools: object) -> list[int]:
        """Tokens of the full conversation and the opening of the next turn.

        Raises:
            BadRequest: With the template's message, if it rejects the conversation; or a message
                that it does not write.
            ContextExceeded: See `encode`.
        """
        try:
            text = self._renderer.render(messages, tools, open_turn=True)
        except Exception as error:  # templates may raise anything
            reason = str(error).split("\n", 1)[0][:300]
            raise BadRequest(f"the chat template refuses the messages: {reason}") from error
        self._check_written(messages, tools, 0)
        return self._encode(text, messages)

    def following(
        self,
        before: Sequence[Message],
        answer: Message,
        after: Sequence[Message],
        tools: object,
        last: int | None,
    ) -> list[int] | None:
        """The tokens between a completion and the next one.

        Args:
            before: The messages that were answered.
            answer: As sent to the client.
            after: Messages since then.
            tools: Of the conversation.
            last: The last generated token; None if there is none.

        Returns:
            The rest of the answer's turn, the messages since then and the opening of the next turn;
            None if the rendered texts do not show where they begin.

        Raises:
            BadRequest: The template does not write one of `after`.
        """
        end = self.decode([last]) if last in self.end_ids and last is not None else ""
        for pair in _placeholder_pairs(answer):
            try:
                open_texts = [
                    self._renderer.render([*before, m, *after], tools, open_turn=True) for m in pair
                ]
                closed_texts = [
                    self._renderer.render([*before, m], tools, open_turn=False) for m in pair
                ]
                full_text = _common_end(*open_texts)
                closing = _common_end(*closed_texts)
            except Exception:  # this placeholder message is rejected; the next one may be accepted
                continue
            rest = self._rest(full_text, closing, end, has_calls=bool(pair[0].get("tool_calls")))
            if rest is not None:
                self._check_written([*before, pair[0], *after], tools, len(before) + 1)
                return self._encode(rest, after)
        return None

    def _check_written(self, messages: Sequence[Message], tools: object, start: int) -> None:
        try:
            self._renderer.check_written(messages, tools, start=start)
        except RowProblem as problem:
            raise BadRequest(str(problem)) from None

    def _rest(self, full_text: str, closing: str, end: str, *, has_calls: bool) -> str | None:
        """Text after an answer's content.

        Args:
            full_text: What follows the placeholder.
            closing: The same if its turn is the last one, possibly starting with the end of a tool
                call.
            end: The end token that the model generated, "" if none.
        """
        shared = common_prefix(full_text, closing)
        places = [(shared.find(mark), mark) for mark in self._ends if mark and mark in shared]
        if places:
            place, mark = min(places)
            return full_text[place + len(mark) :] if end else full_text[place:]
        if has_calls and shared != closing:
            return None
        # the template does not end turns, and the model may have generated the next one's start
        rest = full_text[len(closing) :] if has_calls else full_text
        return rest.removeprefix(end)


def _placeholder_pairs(answer: Message) -> list[list[dict[str, object]]]:
    """Pairs of placeholder messages that differ only in their text: with the answer's calls, with
    its first call only, and as plain text. A template may require calls before tool results, or
    support only a single call."""
    calls = answer.get("tool_calls") or []
    pairs = []
    for count in dict.fromkeys((len(calls), min(len(calls), 1), 0)):
        pair = []
        for word in _WORDS:
            message: dict[str, object] = {"role": answer["role"], "content": word}
            if count:
                message["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": {"x": word}}}
                    for c in calls[:count]
                ]
            pair.append(message)
        pairs.append(pair)
    return pairs


def _common_end(first: str, second: str) -> str:
    """Common suffix of two different texts; "" if they are equal, since nothing can be concluded
    then."""
    if first == second:
        raise ValueError("the template writes no word of the answer")
    return common_prefix(first[::-1], second[::-1])[::-1]
