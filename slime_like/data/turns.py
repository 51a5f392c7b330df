"""Find the assistant's parts of a rendered conversation (loss mask).

They are found by comparing texts that the chat template renders, never by searching for markers, so
that it works for any template; a row for which the comparison fails is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slime_like.data.prompt_format import RowProblem
from slime_like.text import common_prefix

Message = Mapping[str, object]
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
    trained: bool


def is_trained(message: Message) -> bool:
    return message["role"] == ASSISTANT and message.get(STEP_MASK, 1) != 0


def split_trained_turns(
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
    rendered = render(messages)
    segments: list[Segment] = []
    position = 0
    for index, message in enumerate(messages):
        if not is_trained(message):
            continue
        span = _exact_span(render, messages, index, rendered)
        if span is None and mask_type is None:
            raise RowProblem(
                f"message {index} ({ASSISTANT}): the chat template writes this turn otherwise once "
                f"more messages follow, so no mask of the conversation is exact; {_REMEDY}"
            )
        start, stop = span or _changed_span(render, messages, index, rendered)
        text = rendered[start:stop]
        if mask_type in ("qwen", "qwen3"):
            text = _render_single_turn(render, message, index, alone=mask_type == "qwen")
        segments += [Segment(rendered[position:start], False), Segment(text, True)]
        position = stop
    return segments


def _exact_span(
    render: Render, messages: Sequence[Message], index: int, rendered: str
) -> tuple[int, int] | None:
    """Span (start, end) in `rendered` of a turn that is rendered after its prompt exactly as when
    it is the last one; otherwise None."""
    prompt = render(messages[:index], open_turn=True)
    ended = rendered if index + 1 == len(messages) else render(messages[: index + 1])
    if rendered.startswith(ended) and ended.startswith(prompt):
        return len(prompt), len(ended)
    return None


def _changed_span(
    render: Render, messages: Sequence[Message], index: int, rendered: str
) -> tuple[int, int]:
    """Span (start, end) in `rendered` of a turn that the template renders differently when it is
    not the last one, e.g. without its thoughts: from the end of the previous message, after the
    turn's opening, to the turn's end."""
    before = _end_of_message(render, messages, index - 1, rendered)
    stop = _end_of_message(render, messages, index, rendered)
    closed, opened = (render(messages[:index], open_turn=o) for o in (False, True))
    other = render(_with_content(messages, index, "0"))
    if not opened.startswith(closed) or other[:before] != rendered[:before]:
        raise _ambiguous(index)
    opening = common_prefix(opened[len(closed) :], other[before:])
    if not opening or not rendered.startswith(opening, before) or before + len(opening) > stop:
        raise _ambiguous(index)
    return before + len(opening), stop


def _end_of_message(render: Render, messages: Sequence[Message], index: int, rendered: str) -> int:
    """End of a message's text in `rendered`: located through the text after it that does not depend
    on its content, and including the text that closes it when it is the last message."""
    closing = _text_after_content(render, messages[: index + 1], index)
    rest = _text_after_content(render, messages, index)
    if not rest.startswith(closing) or not rendered.endswith(rest[len(closing) :]):
        raise _ambiguous(index)
    return len(rendered) - len(rest) + len(closing)


def _text_after_content(render: Render, messages: Sequence[Message], index: int) -> str:
    first, second = (render(_with_content(messages, index, content))[::-1] for content in "01")
    return common_prefix(first, second)[::-1]


def _with_content(messages: Sequence[Message], index: int, content: str) -> list[Message]:
    return [{**m, "content": content} if i == index else m for i, m in enumerate(messages)]


def _render_single_turn(render: Render, message: Message, index: int, *, alone: bool) -> str:
    """The text of a turn after its opening, as rendered after a question, or, with `alone`, as the
    only message."""
    opening = render([_USER], open_turn=True)
    if not alone:
        rendered = render([_USER, message])
    else:
        question = render([_USER])
        second_question = render([_USER, _USER])[len(question) :]
        if (
            not second_question
            or not question.endswith(second_question)
            or not opening.startswith(question)
        ):
            raise _ambiguous(index)
        # the default system message that the template adds
        opening = question.removesuffix(second_question) + opening[len(question) :]
        rendered = render([message])
    if not rendered.startswith(opening):
        raise _ambiguous(index)
    return rendered[len(opening) :]


def _last_answer(render: Render, messages: Sequence[Message], end: str) -> list[Segment]:
    """The content of the last message, unchanged and with thoughts, after the rendered previous
    messages."""
    prompt, answer = render(messages[:-1], open_turn=True), messages[-1].get("content")
    if not is_trained(messages[-1]) or not isinstance(answer, str) or not answer:
        raise RowProblem(
            "--loss-mask-type distill_qwen: the last message must be an assistant's text"
        )
    thinks = "<think>\n"
    if prompt.endswith(thinks):
        answer = answer.removeprefix(thinks)
    return [Segment(prompt, False), Segment(answer.removesuffix(end) + end, True)]


def _ambiguous(index: int) -> RowProblem:
    return RowProblem(
        f"message {index}: the chat template's texts of this conversation and of its parts do not "
        "fit together, so that no mask is exact; try another --loss-mask-type, or another template"
    )
