"""Find the assistant's parts of a rendered conversation (loss mask).

They are found by comparing texts that the chat template renders, never by searching for markers, so
that it works for any template; a row for which the comparison fails is rejected.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_like.data.prompt_format import RowProblem

Message = Mapping[str, Any]
ASSISTANT = "assistant"
STEP_MASK = "step_loss_mask"  # slime's key of a message: 0 excludes an assistant turn from training
# Ways to locate the text of an assistant turn; None is "exact" below.
MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_USER: Message = {"role": "user", "content": "a question"}
_REMEDY = (
    "give --loss-mask-type: qwen3 (each turn as it is after its question), qwen (each alone) or "
    "qwen3_5 (as the whole conversation has it)"
)


class Render(Protocol):
    """Renders a chat template. open_turn: append the generation prompt."""

    def __call__(self, messages: Sequence[Message], *, open_turn: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a conversation's text. learnt: it is an assistant turn to train on."""

    text: str
    learnt: bool


def is_learnt(message: Message) -> bool:
    return message["role"] == ASSISTANT and message.get(STEP_MASK, 1) != 0


def learnt_segments(
    render: Render, messages: Sequence[Message], mask_type: str | None, *, end: str = ""
) -> list[Segment]:
    """Split the conversation, up to the end of its last trained turn, at the start and end of
    trained turns.

    Args:
        render: The model's template.
        messages: At least one is trained on, but not the first.
        mask_type: One of `MASK_TYPES`, or None: use the rendered conversation, which is exact if
            the template renders each turn in the same way as when it was the last.
        end: The end-of-sequence token, for ``distill_qwen``, where the template does not end turns.

    Returns:
        Untrained and trained segments, alternating, starting with an untrained one.

    Raises:
        RowProblem: Names the message for which the template's texts do not match.
    """
    if mask_type == "distill_qwen":
        return _last_answer(render, messages, end)
    whole = render(messages)
    segments: list[Segment] = []
    position = 0
    for place, message in enumerate(messages):
        if not is_learnt(message):
            continue
        found = _exact_span(render, messages, place, whole)
        if found is None and mask_type is None:
            raise RowProblem(
                f"message {place} ({ASSISTANT}): the chat template writes this turn otherwise once "
                f"more messages follow, so no mask of the conversation is exact; {_REMEDY}"
            )
        start, stop = found or _changed_span(render, messages, place, whole)
        text = whole[start:stop]
        if mask_type in ("qwen", "qwen3"):
            text = _turn_by_itself(render, message, place, alone=mask_type == "qwen")
        segments += [Segment(whole[position:start], False), Segment(text, True)]
        position = stop
    return segments


def _exact_span(
    render: Render, messages: Sequence[Message], place: int, whole: str
) -> tuple[int, int] | None:
    """Span (start, end) in `whole` of a turn that is rendered after its prompt exactly as when it
    is the last one; otherwise None."""
    prompt = render(messages[:place], open_turn=True)
    ended = whole if place + 1 == len(messages) else render(messages[: place + 1])
    if whole.startswith(ended) and ended.startswith(prompt):
        return len(prompt), len(ended)
    return None


def _changed_span(
    render: Render, messages: Sequence[Message], place: int, whole: str
) -> tuple[int, int]:
    """Span (start, end) in `whole` of a turn that the template renders differently when it is not
    the last one, e.g. without its thoughts: from the end of the previous message, after the turn's
    opening, to the turn's end."""
    before = _end_of(render, messages, place - 1, whole)
    stop = _end_of(render, messages, place, whole)
    asked, opened = (render(messages[:place], open_turn=o) for o in (False, True))
    other = render(_with_content(messages, place, "0"))
    if not opened.startswith(asked) or other[:before] != whole[:before]:
        raise _unclear(place)
    opening = _common_start(opened[len(asked) :], other[before:])
    if not opening or not whole.startswith(opening, before) or before + len(opening) > stop:
        raise _unclear(place)
    return before + len(opening), stop


def _end_of(render: Render, messages: Sequence[Message], place: int, whole: str) -> int:
    """End of a message's text in `whole`: located through the text after it that does not depend on
    its content, and including the text that closes it when it is the last message."""
    closing = _after_content(render, messages[: place + 1], place)
    rest = _after_content(render, messages, place)
    if not rest.startswith(closing) or not whole.endswith(rest[len(closing) :]):
        raise _unclear(place)
    return len(whole) - len(rest) + len(closing)


def _after_content(render: Render, messages: Sequence[Message], place: int) -> str:
    first, second = (render(_with_content(messages, place, content))[::-1] for content in "01")
    return _common_start(first, second)[::-1]


def _common_start(a: str, b: str) -> str:
    return "".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def _with_content(messages: Sequence[Message], place: int, content: str) -> list[Message]:
    return [{**m, "content": content} if i == place else m for i, m in enumerate(messages)]


def _turn_by_itself(render: Render, message: Message, place: int, *, alone: bool) -> str:
    """The text of a turn after its opening, as rendered after a question, or, with `alone`, as the
    only message."""
    opened = render([_USER], open_turn=True)
    if not alone:
        written = render([_USER, message])
    else:
        asked = render([_USER])
        question = render([_USER, _USER])[len(asked) :]
        if not question or not asked.endswith(question) or not opened.startswith(asked):
            raise _unclear(place)
        # the default system message that the template adds
        opened = asked.removesuffix(question) + opened[len(asked) :]
        written = render([message])
    if not written.startswith(opened):
        raise _unclear(place)
    return written[len(opened) :]


def _last_answer(render: Render, messages: Sequence[Message], end: str) -> list[Segment]:
    """The content of the last message, unchanged and with thoughts, after the rendered previous
    messages."""
    prompt, answer = render(messages[:-1], open_turn=True), messages[-1].get("content")
    if not is_learnt(messages[-1]) or not isinstance(answer, str) or not answer:
        words = "--loss-mask-type distill_qwen learns the last message, which must be an assistant's text"
        raise RowProblem(words)
    thinks = "<think>\n"
    if prompt.endswith(thinks):
        answer = answer.removeprefix(thinks)
    return [Segment(prompt, False), Segment(answer.removesuffix(end) + end, True)]


def _unclear(place: int) -> RowProblem:
    return RowProblem(
        f"message {place}: the chat template's texts of this conversation and of its parts do not "
        "fit together, so that no mask is exact; try another --loss-mask-type, or another template"
    )
