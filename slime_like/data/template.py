"""Chat templates are programs that come with a model: rendered in bounded time, and their errors
name the row."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

LIMIT_S = 30.0  # for one row, of which a template takes well below a millisecond
P = TypeVar("P")
T = TypeVar("T")
_REMEDY = "correct the row or the template (chat_template of the tokenizer), or leave --apply-chat-template out"


class RowProblem(ValueError):
    """What is wrong with a row, in words for the user; `render_rows` adds the row."""


class _Stopped(BaseException):
    """Raised inside a template that does not end."""


def render_rows(
    render: Callable[[P], T],
    prompts: Sequence[P],
    where: Callable[[int], str],
    *,
    limit_s: float = LIMIT_S,
    remedy: str = _REMEDY,
) -> list[T]:
    """Render every prompt, in a thread that can be given up.

    Args:
        render: the template.
        prompts: its inputs, one for each row.
        where: the place of a row in words, by its index in `prompts`.
        limit_s: seconds for one row.
        remedy: what the user can do, for errors.

    Returns:
        The texts, in order.

    Raises:
        ValueError: naming the row whose template raised or did not end.
    """
    texts: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            for prompt in prompts:
                texts.append(render(prompt))
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
        if isinstance(error, RowProblem):
            raise ValueError(f"{where(len(texts))}: {error}") from error
        words = str(error).split("\n", 1)[0][:300]
        raise ValueError(
            f"{where(len(texts))}: the chat template raised {type(error).__name__}: {words}; {remedy}"
        ) from error
    return texts


def _stop(thread: threading.Thread) -> None:
    """Have the thread raise at its next step of Python, which a loop of a template reaches."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped)
    )
