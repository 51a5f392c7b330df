"""reasoning-gym tasks as a data source: ``reasoning_gym:<task>?size=1000&seed=1&<option>=<value>``.

reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760) generates problems from a seed and grades
answers with a verifier per task. A row is ``{"question", "answer", "metadata"}``; --input-key and
similar flags apply to files only. Its metadata has ``task`` (name and options) and ``entry`` (the
generated problem), from which the reward `task` computes the score.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import importlib.metadata
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, Union
from urllib.parse import parse_qsl

from slime_like.config import read_number
from slime_like.data.rows import TASK_PREFIX, Row
from slime_like.data.values import plain
from slime_like.extras import pip_install

DEFAULT_SEED = 0  # reasoning-gym's default differs per process, so a run could not be resumed


class TaskSource:
    """Rows generated on demand. Raises ValueError for an unknown task or option (with similar
    names), and for an illegal value."""

    def __init__(self, spec: str, *, flag: str = "--prompt-data") -> None:
        try:
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(
                f"{flag} {spec}: needs reasoning-gym: {pip_install('tasks')}"
            ) from error
        where = f"{flag} {spec}"
        task, _, query = spec.removeprefix(TASK_PREFIX).partition("?")
        if task not in DATASETS:
            raise ValueError(f"{where}: unknown task {task!r}{_suggestion(task, DATASETS)}")
        self.options = parse_options(task, query, DATASETS[task][1], where)
        self.task = task
        try:
            self._dataset = create_dataset(task, **self.options)
        except (AssertionError, ValueError, TypeError) as error:
            raise ValueError(f"{where}: the task rejects these options: {error}") from error
        self.name = spec
        self.notes: list[str] = []
        options_text = json.dumps(self.options, sort_keys=True, default=str)
        version = importlib.metadata.version("reasoning-gym")  # others make other problems
        self.content = f"reasoning_gym version={version} {task} {options_text}"

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return [self._row(self._dataset[index]) for index in indices]

    def _row(self, entry: Row) -> Row:
        entry = plain(entry)  # some tasks have numpy's types, which no recording can hold
        metadata = {"task": {"name": self.task, "options": self.options}, "entry": entry}
        return {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}

    def where(self, index: int) -> str:
        return f"{self.name}: problem {index}"


def parse_options(task: str, query: str, config_type: type, where: str) -> dict[str, object]:
    """Parse ``size=10&seed=1`` to typed keyword arguments of `config_type`, the task's
    configuration dataclass."""
    hints = typing.get_type_hints(config_type)
    names = [field.name for field in dataclasses.fields(config_type)]
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in names:
            raise ValueError(f"{where}: no option {name!r}{_suggestion(name, names)}")
        if name in options:
            raise ValueError(f"{where}: option {name!r} is given twice")
        try:
            options[name] = convert(text, hints[name])
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{where}: option {name}={text!r}: expected {_type_name(hints[name])} ({error})"
            ) from error
    if "seed" in names:
        options.setdefault("seed", DEFAULT_SEED)
    if options.get("size", 1) < 1:
        raise ValueError(f"{where}: option size={options['size']}: must be >= 1")
    return options


def convert(text: str, annotation: object) -> object:
    """Convert an option's text to its annotated type. Lists and tuples: JSON, or comma-separated
    items."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "null") and type(None) in arguments:
            return None
        return convert(text, next(a for a in arguments if a is not type(None)))
    if origin is Literal:
        if text not in arguments:
            raise ValueError(f"legal values: {', '.join(map(str, arguments))}")
        return text
    container = origin or annotation
    if container in (list, tuple, typing.get_origin(Sequence[str])):
        items = json.loads(text) if text.startswith("[") else text.split(",")
        item_type = arguments[0] if arguments else str
        values = [
            convert(item, item_type) if isinstance(item, str) else _as_tuple(item, item_type)
            for item in items
        ]
        return tuple(values) if container is tuple else values
    return _convert_plain(text, annotation)


def _convert_plain(text: str, annotation: object) -> object:
    if annotation is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError("legal values: true, false")
        return text.lower() in ("true", "1")
    if annotation is int or annotation is float:
        return read_number(text, annotation)
    if annotation is str:
        return text
    if annotation in (datetime.date, datetime.time, datetime.datetime):
        return annotation.fromisoformat(text)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation(text)
    raise TypeError("this option cannot be given as text")


def _as_tuple(item: object, annotation: object) -> object:
    """Convert a decoded JSON item: inner lists become tuples if the task expects tuples."""
    if isinstance(item, list) and typing.get_origin(annotation) is tuple:
        return tuple(item)
    return item


def _type_name(annotation: object) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _suggestion(name: str, names: typing.Iterable[str]) -> str:
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else f"; legal names: {', '.join(names)}"
