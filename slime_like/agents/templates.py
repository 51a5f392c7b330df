"""A tokenizer's chat template, as a conversation grows: the first prompt, and what follows an answer
that is kept as it was generated.

What follows is found by comparing texts that the template writes, as in `data/turns.py`: the same
conversation is written twice with different words in the answer's place, and what both texts end
with follows the answer. Of that, the end of the answer's turn is left out where the model wrote it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_like.agents.messages import BadRequest, Message

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
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Tokens of the full conversation and the opening of the next turn.

        Raises:
            BadRequest: With the template's message, if it rejects the conversation.
        """
        try:
            return self.encode(self._render(messages, tools, open_turn=True))
        except Exception as error:  # templates may raise anything
            words = str(error).split("\n", 1)[0][:300]
            raise BadRequest(f"the chat template refuses the messages: {words}") from error

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
        for stand_ins in _stand_ins(answer):
            try:
                whole, closing = [
                    _common_end(
                        *(
                            self._render([*before, word, *more], tools, open_turn=opens)
                            for word in stand_ins
                        )
                    )
                    for more, opens in ((after, True), ((), False))
                ]
            except Exception:  # this placeholder message is rejected; the next one may be accepted
                continue
            rest = self._rest(whole, closing, end, has_calls=bool(stand_ins[0].get("tool_calls")))
            if rest is not None:
                return self.encode(rest)
        return None

    def _rest(self, whole: str, closing: str, end: str, *, has_calls: bool) -> str | None:
        """Text after an answer's content. whole: what follows the placeholder. closing: the same if
        its turn is the last one, possibly starting with the end of a tool call. end: the end token
        that the model generated, "" if none."""
        shared = _common_start(whole, closing)
        places = [(shared.find(mark), mark) for mark in self._ends if mark and mark in shared]
        if places:
            place, mark = min(places)
            return whole[place + len(mark) :] if end else whole[place:]
        if has_calls and shared != closing:
            return None
        # the template does not end turns, and the model may have generated the next one's start
        rest = whole[len(closing) :] if has_calls else whole
        return rest.removeprefix(end)

    def _render(self, messages: Sequence[Message], tools: object, *, open_turn: bool) -> str:
        found = self.tokenizer.chat_template
        template = found if isinstance(found, str) else ""
        roles = {} if "developer" in str(found) else {"developer": "system"}
        own = [{**m, "role": roles.get(m["role"], m["role"])} for m in messages]
        if _IS_NONE.search(template):
            marked = [
                m | {"content": m["content"] or _NO_CONTENT} if m.get("tool_calls") else m
                for m in own
            ]
            text = self._applied(
                marked, tools, open_turn=open_turn, chat_template=_IS_NONE.sub(_compared, template)
            )
            if _NO_CONTENT not in text:  # otherwise it tests other messages
                return text
        return self._applied(own, tools, open_turn=open_turn)

    def _applied(
        self, messages: Sequence[Message], tools: object, *, open_turn: bool, **more: object
    ) -> str:
        def apply(given: Sequence[Message]) -> str:
            text = self.tokenizer.apply_chat_template(
                list(given),
                tokenize=False,
                add_generation_prompt=open_turn,
                **({"tools": tools} if tools else {}),
                **more,
                **self._arguments,
            )
            return str(text)

        try:
            return apply(messages)
        except TypeError:  # for templates that concatenate arguments as text
            return apply([_in_text(m) for m in messages])


def _compared(match: re.Match[str]) -> str:
    return f"{match[1]} {'!=' if match[2] else '=='} '{_NO_CONTENT}'"


def _in_text(message: Message) -> dict[str, object]:
    """The message with its calls' arguments as JSON text."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _json(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _stand_ins(answer: Message) -> list[list[dict[str, object]]]:
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
    return _common_start(first[::-1], second[::-1])[::-1]


def _common_start(a: str, b: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return a[: sum(1 for _ in same)]
