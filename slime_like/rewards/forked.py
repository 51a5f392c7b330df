"""A score in a forked child: what a text does to the process that evaluates it ends with its own
sample."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from slime_like.rewards import confinement
from slime_like.rewards.sandbox import SandboxError

_MOST = 2**20  # bytes of a response
_OPEN = "not confined"  # key in the response of a child that did not call `score`


def in_child(score: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Call `score` in a forked child that may only compute and respond.

    Returns:
        The child's answer, or ``{"died": how}``.

    Raises:
        SandboxError: The child's rights could not be revoked.
    """
    parent = os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(score, writer, parent)
    os.close(writer)
    data = b""
    while (part := os.read(reader, 2**16)) and len(data) <= _MOST:
        data += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        try:
            answer = json.loads(data)
        except ValueError:
            return {"died": "its answer cannot be read"}
        if isinstance(answer, dict) and isinstance(answer.get(_OPEN), str):
            raise SandboxError(f"a child of the grader cannot be confined: {answer[_OPEN]}")
        if _is_answer(answer):
            return dict(answer)
        return {"died": "its answer cannot be read"}
    return {"died": f"signal {-code}" if code < 0 else f"exit code {code}"}


def _is_answer(answer: object) -> bool:
    if not isinstance(answer, dict) or len(answer) != 1:
        return False
    value = answer.get("value", answer.get("raised", answer.get("wrong_type")))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number if "value" in answer else isinstance(value, str)


def _confined(score: Callable[[], dict[str, object]]) -> dict[str, object]:
    try:
        confinement.lock_child()
    except OSError as error:
        return {_OPEN: str(error)}
    return score()


def _answer(score: Callable[[], dict[str, object]], writer: int, parent: int) -> NoReturn:
    try:
        gc.disable()  # the child is short-lived, and a collection would copy pages that it touches
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        confinement.die_with(parent)
        os.closerange(3, writer)
        os.closerange(writer + 1, 256)
        body = json.dumps(_confined(score)).encode()
        while body:
            body = body[os.write(writer, body) :]
    except BaseException:
        os._exit(1)
    os._exit(0)
