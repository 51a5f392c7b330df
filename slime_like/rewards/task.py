"""The scorer of a reasoning-gym task (`data/tasks.py`), between 0 and 1.

Several of these scorers evaluate the model's text as an expression (sympy), so this reward runs in a worker process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def prepare() -> None:
    import reasoning_gym  # noqa: F401


def problem(label: Any, metadata: Mapping[str, Any]) -> str | None:
    """Why no response to this row can be scored, or None: ``task`` (name, options) and ``entry`` must be in its metadata."""
    task, entry = metadata.get("task"), metadata.get("entry")
    if (
        isinstance(task, Mapping)
        and {"name", "options"} <= task.keys()
        and isinstance(entry, Mapping)
    ):
        return None
    return (
        "the reward task needs 'task' (name, options) and 'entry' in the row's metadata (--metadata-key), which rows of a "
        "reasoning_gym:<task> source have; choose another --rm-type, or name one in the metadata with the key rm_type"
    )


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """What the task's verifier says about the answer in the response. Raises ValueError when the sample has no task."""
    if words := problem(label, metadata):
        raise ValueError(words)
    task = metadata["task"]
    key = task["name"] + json.dumps(task["options"], sort_keys=True, default=str)
    if key not in _datasets:
        from reasoning_gym import create_dataset

        _datasets[key] = create_dataset(task["name"], **task["options"])
    return float(_datasets[key].score_answer(extract_answer(response), metadata["entry"]))


def extract_answer(response: str) -> str:
    """The text within the last ``<answer></answer>``, else the whole response; stripped."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return (response if start < 0 else response[start + len("<answer>") : end]).strip()


_datasets: dict[str, Any] = {}  # a run has one or a few
