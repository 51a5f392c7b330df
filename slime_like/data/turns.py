"""Find the assistant's parts of a rendered conversation (loss mask).

They are found by comparing texts that the chat template renders, never by searching for markers, so
that it works for any template; a row for which the comparison fails is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slime_like.data.messages import ASSISTANT, Message
from slime_like.data.rendering import RowProblem
from slime_like.text import common_prefix

# keys of a message, slime's and OpenAI's: 0 excludes an assistant turn from training
STEP_MASK = "step_loss_mask"
MASKS = (STEP_MASK, "weight")
# Ways to locate the text of an assistant turn; None is "exact" below.
MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_THINK = "<think>"
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
    """A part of a conversation's text."""

    text: str
    trained: bool  # it is an assistant turn to train on


def is_trained(message: Message) -> bool:
    return message["role"] == ASSISTANT and all(message.get(key, 1) != 0 for key in MASKS)


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
        turn = _exact_turn(render, messages, index, rendered)
        if turn is None and mask_type is None:
            reason = "writes this turn otherwise once more messages follow"
            if index + 1 == len(messages):
                reason = "writes this turn otherwise than the opening under which it is sampled"
            raise RowProblem(
                f"message {index} ({ASSISTANT}): the chat template {reason}, so no mask of the "
                f"conversation is exact; {_REMEDY}"
            )
        turn = turn or _changed_turn(render, messages, index, rendered)
        context = rendered[position : turn.start]
        text = rendered[turn.start : turn.stop]
        if mask_type in ("qwen", "qwen3"):
            opening, text = _render_single_turn(render, message, index, alone=mask_type == "qwen")
            # Sampled after the full opening, of which the conversation may have only a part.
            context = rendered[position : turn.before] + turn.opening
            if not context.endswith(opening):
                raise _ambiguous(index)
        segments += [Segment(context, False), Segment(text, True)]
        position = turn.stop
    return segments


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn in the text of a conversation."""

    before: int  # end of the text before it that generation continues
    opening: str  # what the template adds there to open the turn
    start: int  # of the turn's text in the conversation
    stop: int  # of the turn's text in the conversation


def _exact_turn(
    render: Render, messages: Sequence[Message], index: int, rendered: str
) -> _Turn | None:
    """A turn that is rendered after its prompt exactly as when it is the last one; otherwise
    None."""
    prompt = render(messages[:index], open_turn=True)
    ended = rendered if index + 1 == len(messages) else render(messages[: index + 1])
    if rendered.startswith(ended) and ended.startswith(prompt):
        return _Turn(before=len(prompt), opening="", start=len(prompt), stop=len(ended))
    return None


def _changed_turn(render: Render, messages: Sequence[Message], index: int, rendered: str) -> _Turn:
    """A turn that the template renders differently when it is not the last one, e.g. without its
    thoughts: from the end of the previous message, after the part of the opening that the
    conversation has, to the turn's end."""
    before = _end_of_message(render, messages, index - 1, rendered)
    stop = _end_of_message(render, messages, index, rendered)
    closed, opened = (render(messages[:index], open_turn=o) for o in (False, True))
    other = render(_with_content(messages, index, "0"))
    if not opened.startswith(closed) or other[:before] != rendered[:before]:
        raise _ambiguous(index)
    opening = common_prefix(opened[len(closed) :], other[before:])
    if not opening or not rendered.startswith(opening, before) or before + len(opening) > stop:
        raise _ambiguous(index)
    return _Turn(before, opened[len(closed) :], before + len(opening), stop)


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


def _render_single_turn(
    render: Render, message: Message, index: int, *, alone: bool
) -> tuple[str, str]:
    """A turn as rendered after a question, or, with `alone`, as the only message: its opening, and
    the text after it."""
    prompt = render([_USER], open_turn=True)
    question = render([_USER])
    opening = prompt.removeprefix(question) if prompt.startswith(question) else ""
    if not alone:
        before = prompt
        rendered = render([_USER, message])
    else:
        second_question = render([_USER, _USER])[len(question) :]
        if (
            not second_question
            or not question.endswith(second_question)
            or not prompt.startswith(question)
        ):
            raise _ambiguous(index)
        # the default system message that the template adds
        before = question.removesuffix(second_question) + opening
        try:
            rendered = render([message])
        except Exception as error:  # templates may raise anything
            reason = str(error).split("\n", 1)[0]
            raise RowProblem(
                f"message {index}: the chat template takes no turn without a question ({reason}), "
                "as --loss-mask-type qwen needs it; give another type"
            ) from error
    if not rendered.startswith(before):
        raise _ambiguous(index)
    return opening, rendered[len(before) :]


def _last_answer(render: Render, messages: Sequence[Message], end: str) -> list[Segment]:
    """The content of the last message, unchanged and with thoughts, after the rendered previous
    messages."""
    prompt = render(messages[:-1], open_turn=True)
    last = messages[-1]
    answer = last.get("content")
    if not is_trained(last) or not isinstance(answer, str) or not answer:
        raise RowProblem(
            "--loss-mask-type distill_qwen: the last message must be an assistant's text"
        )
    for key in ("reasoning_content", "tool_calls"):
        if last.get(key):
            raise RowProblem(
                "--loss-mask-type distill_qwen trains on 'content' alone, and the last message "
                f"has {key!r}; write it into the content, or give another type"
            )
    answer = continue_turn(prompt, answer)
    return [Segment(prompt, False), Segment(answer.removesuffix(end) + end, True)]


def continue_turn(prompt: str, answer: str) -> str:
    """A given answer as the continuation of a prompt: if the chat template opens a thought
    (``<think>``) at the end of the prompt, without it.

    Raises:
        RowProblem: The answer does not end this thought, so that all of it would be one.
    """
    if not prompt.rstrip().endswith(_THINK):
        return answer
    if "</think>" not in answer:
        raise RowProblem(
            f"the chat template opens a thought ({_THINK}), which the answer does not end with "
            "</think>; write the answer with its thought, which may be empty, or close it in the "
            "template (--apply-chat-template-kwargs '{\"enable_thinking\": false}')"
        )
    if not answer.lstrip().startswith(_THINK):
        return answer
    return answer.lstrip().removeprefix(_THINK).removeprefix(prompt[len(prompt.rstrip()) :])


def _ambiguous(index: int) -> RowProblem:
    return RowProblem(
        f"message {index}: the chat template's texts of this conversation and of its parts do not "
        "fit together, so that no mask is exact; try another --loss-mask-type, or another template"
    )
