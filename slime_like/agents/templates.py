"""A tokenizer's chat template in a growing conversation: the first prompt, and the text between a
generated answer, whose tokens are kept, and the next one.

That text is found by comparing rendered texts, as in `data/turns.py`: the conversation is rendered
twice with different placeholders for the answer, and the common suffix of both follows the answer.
The end of the answer's turn is removed from it if the model generated it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_like.agents.messages import BadRequest, Message
from slime_like.text import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WORDS = ("0", "1")  # placeholders for a completion's text
# For templates that render calls only if there is no content, as opposed to empty content.
# transformers drops keys without a value, so a marker stands for None, in the template as well.
_IS_NONE = re.compile(r"""(content(?:['"]\])?) is (not )?none""")
_NO_CONTENT = "<no content>"


class ChatTemplate:
    """Renders and tokenises conversations with a tokenizer's chat template. end_ids: tokens that
    end a response."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Collection[int],
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: Hugging Face tokenizer with a chat template.
            end_ids: Tokens that end a response, including those of the tokenizer.
            arguments: Further arguments of the template (--apply-chat-template-kwargs).

        Raises:
            ValueError: The tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("agents need a chat template, and the tokenizer has none")
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self._arguments = dict(arguments or {})
        self._ends = [tokenizer.decode([i], skip_special_tokens=False) for i in self.end_ids]

    def encode(self, text: str) -> list[int]:
        """Tokenise a text that already contains its special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, including special ones."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **options))

    def prompt(self, messages: Sequence[Message], tools: object) -> list[int]:
        """Tokens of the full conversation and the opening of the next turn.

        Raises:
            BadRequest: With the template's message, if it rejects the conversation.
        """
        try:
            return self.encode(self._render(messages, tools, open_turn=True))
        except Exception as error:  # templates may raise anything
            reason = str(error).split("\n", 1)[0][:300]
            raise BadRequest(f"the chat template refuses the messages: {reason}") from error

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
        """
        end = self.decode([last]) if last in self.end_ids and last is not None else ""
        for pair in _placeholder_pairs(answer):
            try:
                open_texts = [
                    self._render([*before, m, *after], tools, open_turn=True) for m in pair
                ]
                closed_texts = [self._render([*before, m], tools, open_turn=False) for m in pair]
                full_text, closing = _common_end(*open_texts), _common_end(*closed_texts)
            except Exception:  # this placeholder message is rejected; the next one may be accepted
                continue
            rest = self._rest(full_text, closing, end, has_calls=bool(pair[0].get("tool_calls")))
            if rest is not None:
                return self.encode(rest)
        return None

    def _rest(self, full_text: str, closing: str, end: str, *, has_calls: bool) -> str | None:
        """Text after an answer's content. full_text: what follows the placeholder. closing: the
        same if its turn is the last one, possibly starting with the end of a tool call. end: the
        end token that the model generated, "" if none."""
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

    def _render(self, messages: Sequence[Message], tools: object, *, open_turn: bool) -> str:
        template_source = self.tokenizer.chat_template
        template = template_source if isinstance(template_source, str) else ""
        roles = {} if "developer" in str(template_source) else {"developer": "system"}
        mapped = [{**m, "role": roles.get(m["role"], m["role"])} for m in messages]
        if _IS_NONE.search(template):
            marked = []
            for m in mapped:
                is_empty = bool(m.get("tool_calls")) and not m["content"]
                marked.append(m | {"content": _NO_CONTENT} if is_empty else m)
            text = self._apply_template(
                marked,
                tools,
                open_turn=open_turn,
                chat_template=_IS_NONE.sub(_compare_to_marker, template),
            )
            if _NO_CONTENT not in text:  # otherwise it tests other messages
                return text
        return self._apply_template(mapped, tools, open_turn=open_turn)

    def _apply_template(
        self, messages: Sequence[Message], tools: object, *, open_turn: bool, **extra: object
    ) -> str:
        def apply(conversation: Sequence[Message]) -> str:
            text = self.tokenizer.apply_chat_template(
                list(conversation),
                tokenize=False,
                add_generation_prompt=open_turn,
                **({"tools": tools} if tools else {}),
                **extra,
                **self._arguments,
            )
            return str(text)

        try:
            return apply(messages)
        except TypeError:  # for templates that concatenate arguments as text
            return apply([_with_text_arguments(m) for m in messages])


def _compare_to_marker(match: re.Match[str]) -> str:
    return f"{match[1]} {'!=' if match[2] else '=='} '{_NO_CONTENT}'"


def _with_text_arguments(message: Message) -> dict[str, object]:
    """The message with its calls' arguments as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


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
