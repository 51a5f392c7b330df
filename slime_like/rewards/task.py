"""The scorer of a reasoning-gym task (`data/tasks.py`), between 0 and 1.

Several of these scorers evaluate the model's text as Python or sympy (`eval`, `parse_expr`). Where
that is more than arithmetic, the answer is scored like an empty one (`evaluation.py`).
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.rewards import big_numbers, evaluation

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


_MAX_LENGTH = 10000  # characters of an answer; parsing longer ones may overflow the stack
_REGISTERED = re.compile(r"(?:register_dataset\(\s*|DATASET_NAME\s*=\s*)[\"']([a-z0-9_]+)[\"']")


def prepare() -> None:
    import reasoning_gym  # noqa: F401

    big_numbers.bound()


def problem(label: object, metadata: Mapping[str, object]) -> str | None:
    """Why no response to this row can be scored, or None: its metadata needs ``task`` (name,
    options) and ``entry``."""
    task = metadata.get("task")
    has_task = isinstance(task, Mapping) and {"name", "options"} <= task.keys()
    if has_task and isinstance(metadata.get("entry"), Mapping):
        return None
    return (
        "the reward task needs 'task' (name, options) and 'entry' in the row's metadata "
        "(--metadata-key), which rows of a reasoning_gym:<task> source have; choose another "
        "--rm-type, or name one in the metadata with the key rm_type"
    )


def score(response: str, label: object, metadata: Mapping[str, Any]) -> float:
    """Score of the task's verifier for the answer in the response. Raises ValueError if the sample
    has no task."""
    if reason := problem(label, metadata):
        raise ValueError(reason)
    answer = extract_answer(response)
    if len(answer) > _MAX_LENGTH:
        evaluation.refuse()
    return float(_dataset(metadata).score_answer(answer, metadata["entry"]))


def _dataset(metadata: Mapping[str, Any]) -> ProceduralDataset:
    """The row's reasoning-gym dataset, created once."""
    task = metadata["task"]
    key = task["name"] + json.dumps(task["options"], sort_keys=True, default=str)
    if key not in _datasets:
        from reasoning_gym import create_dataset

        _datasets[key] = create_dataset(task["name"], **task["options"])
    return _datasets[key]


def unknown(spec: str) -> str | None:
    """Problem with the task name in ``reasoning_gym:<task>?...``, with similar names, or None.

    Searches the package's source first, because importing it takes seconds and is only needed if
    the name seems wrong.
    """
    name = spec.partition(":")[2].partition("?")[0]
    if name in _registered_names():
        return None
    from reasoning_gym.factory import DATASETS

    if name in DATASETS:
        return None
    if similar := difflib.get_close_matches(name, sorted(DATASETS), n=3, cutoff=0.5):
        return f"unknown task {name!r}; nearest: {', '.join(similar)}"
    return f"unknown task {name!r}; legal names: {', '.join(sorted(DATASETS))}"


@functools.cache
def _registered_names() -> frozenset[str]:
    """Task names that the installed package's source registers."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    names = set[str]()
    for folder in folders:
        for file in Path(folder).rglob("*.py"):
            names.update(_REGISTERED.findall(file.read_text(errors="replace")))
    return frozenset(names)


def extract_answer(response: str) -> str:
    """The text within the last ``<answer></answer>``, otherwise the full response; stripped."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return (response if start < 0 else response[start + len("<answer>") : end]).strip()


_datasets: dict[str, ProceduralDataset] = {}  # a run has one or a few
