"""Jobs and answers of a grading worker, and how they travel through its pipes."""

from __future__ import annotations

import json
import numbers
import os
import pickle
import struct
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypedDict

from slime_like.rewards import reaper as reaper
from slime_like.samples.slime_sample import SlimeSample
from slime_like.text import clean

ASYNC_SLOTS = 64  # concurrent samples of a worker with an asynchronous function, by default


@dataclass(frozen=True, slots=True)
class GradingJob:
    """A unit of work. rm_type None: the custom function, with `sample` (a list: all samples of a
    group, --group-rm); otherwise `texts`."""

    id: int
    rm_type: str | None
    sample: SlimeSample | list[SlimeSample] | None = None
    texts: list[Text] = field(default_factory=list)


def _read(pipe: BinaryIO) -> Any:
    """Read the next frame; None at the end."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = pipe.read(HEADER.unpack(header)[0])
    return pickle.loads(body)


def _write(pipe: BinaryIO, answer: Answer) -> None:
    body = json.dumps(answer).encode()
    pipe.write(HEADER.pack(len(body)) + body)
    pipe.flush()


def answer_to(job: GradingJob, value: Any, reward_key: str | None) -> Answer:
    """Like `to_answer`; for a group, one answer per sample under ``group``."""
    if not isinstance(job.sample, list):
        return to_answer(value, reward_key)
    if isinstance(value, dict | str) or not hasattr(value, "__len__"):
        return {
            "wrong_type": f"{type(value).__name__} for a group of {len(job.sample)} samples, not "
            "a list of rewards"
        }
    if len(value) != len(job.sample):
        return {"wrong_type": f"{len(value)} rewards for a group of {len(job.sample)} samples"}
    return {"group": [to_answer(item, reward_key) for item in value]}


def raised(error: BaseException) -> Answer:
    return {"raised": _reason(error)}


HEADER = struct.Struct("<Q")


Text = tuple[str, object, dict[str, object]]  # response, label, metadata


class Answer(TypedDict, total=False):
    """Result of a job: `value`, perhaps with `details` and `tokens`; or why there is none."""

    job: int  # id
    value: float | None
    details: dict[str, float]
    tokens: list[float]
    # values, batch: of a job with several texts; `values` if all are plain numbers
    values: list[float]
    batch: list[Answer]
    group: list[Answer]  # one answer per sample
    wrong_type: str  # description of a value that is no reward
    raised: str  # the exception, as text
    timeout: bool  # `raised`, if there, says what took the time
    spent: float  # CPU seconds of the worker until its timeout
    died: str  # how the worker ended
    refused: str  # why the text is not scored
    unfit: str  # why an answer is scored like an empty one (`Grader`)
    ready: int  # the worker has started
    failed: str  # why the worker could not start
    last: bool  # the worker ends after this answer


def to_answer(value: Any, reward_key: str | None) -> Answer:
    """Convert a reward function's value to an answer.

    `details` are the other numbers of a dict. `tokens` are token rewards: a list, or the key
    ``token_rewards`` of a dict. The response's reward is then the dict's value under `reward_key`
    (or ``score``), otherwise their sum.
    """
    if type(value) is float:
        return {"value": value}
    details: dict[str, float] = {}
    tokens: Any = _row_of_numbers(value)
    if isinstance(value, dict):
        if (reward_key or TOKEN_REWARDS) not in value:
            return {"wrong_type": f"a dict with the keys {', '.join(map(repr, value)) or '(none)'}"}
        key = reward_key or SCORE
        details = {
            str(name): float(item)
            for name, item in value.items()
            if name != key and isinstance(item, numbers.Real)
        }
        if TOKEN_REWARDS in value and (tokens := _row_of_numbers(value[TOKEN_REWARDS])) is None:
            return {"wrong_type": f"{TOKEN_REWARDS!r} that are no list of numbers"}
        value = value[key] if key in value else sum(tokens)
    elif tokens is not None:
        value = sum(tokens)
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()  # numpy and torch scalars
        except (ValueError, RuntimeError):
            return {"wrong_type": f"{type(value).__name__} of more than one dimension"}
    if value is not None and not isinstance(value, numbers.Real):
        return {"wrong_type": type(value).__name__}
    answer: Answer = {"value": None if value is None else float(value)}
    if tokens is not None:
        answer["tokens"] = tokens
    return {**answer, "details": details} if details else answer


def _reason(error: BaseException) -> str:
    """Type, message, and the innermost code location outside of this project, libraries and the
    interpreter."""
    message = f"{type(error).__name__}: {_message(error)}"
    folder = os.path.dirname(os.path.abspath(__file__))
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((folder, "<", sys.base_prefix))
        and f"{os.sep}site-packages{os.sep}" not in frame.filename
    ]
    return clean(f"{message} ({places[-1]})" if places else message)


# keys of a dict with token rewards
SCORE = "score"


TOKEN_REWARDS = "token_rewards"


def _row_of_numbers(value: Any) -> list[float] | None:
    """Numbers of a list, tuple or 1-D array or tensor; None for anything else, and for arrays of
    one element, which count as numbers."""
    if getattr(value, "ndim", 0) == 1 and len(value) != 1:
        value = value.tolist()
    if isinstance(value, list | tuple) and all(isinstance(item, numbers.Real) for item in value):
        return [float(item) for item in value]
    return None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be made: {type(second).__name__})"
