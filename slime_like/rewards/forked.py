"""Score a text in a forked child, so that it can only harm the process of its own sample."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from slime_like.rewards import confinement
from slime_like.rewards.sandbox import SandboxError

if TYPE_CHECKING:
    from slime_like.rewards.worker import Answer

_MAX_ANSWER = 2**20  # bytes
_UNCONFINED = "not confined"  # key in the answer of a child that did not call `score`


def in_child(score: Callable[[], Answer]) -> Answer:
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
    while (part := os.read(reader, 2**16)) and len(data) <= _MAX_ANSWER:
        data += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        return {"died": f"signal {-code}" if code < 0 else f"exit code {code}"}
    try:
        answer: object = json.loads(data)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get(_UNCONFINED), str):
        raise SandboxError(f"a child of the grader cannot be confined: {answer[_UNCONFINED]}")
    return answer if _is_answer(answer) else {"died": "its answer cannot be read"}


def _is_answer(answer: object) -> TypeGuard[Answer]:
    """Check an answer of a child, which is untrusted."""
    if not isinstance(answer, dict) or len(answer) != 1:
        return False
    value = answer.get("value", answer.get("raised", answer.get("wrong_type")))
    if "value" in answer:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str)


def _confined(score: Callable[[], Answer]) -> Mapping[str, object]:
    try:
        confinement.lock_child()
    except OSError as error:
        return {_UNCONFINED: str(error)}
    return score()


def _answer(score: Callable[[], Answer], writer: int, parent: int) -> NoReturn:
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
