"""Run chat templates over rows. They are programs that come with a model: rendering has a time
limit, and errors name the row."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from slime_like.text import clean

LIMIT_S = 30.0  # seconds per row; a template normally takes far less than a millisecond
_LONGEST = 2**26  # characters of a rendered row
P = TypeVar("P")
T = TypeVar("T")
_REMEDY = (
    "correct the row or the template (chat_template of the tokenizer), or remove "
    "--apply-chat-template"
)


class RowProblem(ValueError):
    """A problem with a row, as a message for the user; `render_rows` adds the row."""


class _TemplateTimeout(BaseException):
    """Raised inside a template that does not terminate."""


def render_rows(
    render: Callable[[P], T],
    prompts: Sequence[P],
    where: Callable[[int], str],
    *,
    limit_s: float = LIMIT_S,
    remedy: str = _REMEDY,
) -> list[T]:
    """Render every prompt, in a thread that can be abandoned.

    Args:
        render: The template.
        prompts: Its inputs, one per row.
        where: Returns a row's location for messages, by index in `prompts`.
        limit_s: Seconds per row.
        remedy: Suggestion to the user, for errors.

    Returns:
        The texts, in order.

    Raises:
        ValueError: Names the row whose template raised or did not terminate.
    """
    texts: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            for prompt in prompts:
                texts.append(_text(render(prompt), remedy))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="chat-template", daemon=True)
    thread.start()
    done = -1
    while not ended.wait(limit_s):
        if len(texts) == done:
            _stop(thread)
            raise ValueError(
                f"{where(done)}: the chat template has not ended after {limit_s:g} s; {remedy}"
            )
        done = len(texts)
    if errors:
        error = errors[0]
        location = where(len(texts))
        if isinstance(error, RowProblem):
            raise ValueError(f"{location}: {clean(error)}") from error
        reason = clean(str(error).split("\n", 1)[0], 300)
        raise ValueError(
            f"{location}: the chat template raised {type(error).__name__}: {reason}; {remedy}"
        ) from error
    return texts


def _text(rendered: T, remedy: str) -> T:
    """The rendered text, if a tokenizer accepts it. Raises RowProblem."""
    if isinstance(rendered, str):
        if len(rendered) > _LONGEST:
            raise RowProblem(f"the chat template wrote {len(rendered)} characters; {remedy}")
        try:
            rendered.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(
                f"the chat template wrote half of a surrogate pair at character {error.start}; "
                f"{remedy}"
            ) from error
    return rendered


def _stop(thread: threading.Thread) -> None:
    """Raise an exception in the thread at its next Python instruction, which also interrupts loops
    of a template."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_TemplateTimeout)
    )
