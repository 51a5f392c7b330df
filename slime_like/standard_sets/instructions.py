"""Verifiable instructions: IFEval (Zhou et al. 2023, arXiv 2311.07911) and IFBench (Pyatkin et al.
2025, arXiv 2507.02833)."""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.standard_sets.base import (
    NotThisSet,
    Problem,
    Row,
    StandardSet,
    column,
    standard_sets,
    texts,
)


def ifeval(row: Row) -> Problem:
    """A row that is graded in the strict mode."""
    return _problem(row)


def ifbench(row: Row) -> Problem:
    """A row that is graded in the loose mode, which the paper reports."""
    return _problem(row, loose=True)


def _problem(row: Row, **more: bool) -> Problem:
    """A row with a prompt, the names of its instructions, and the settings of each."""
    prompt, ids = column(row, "prompt"), texts(row, "instruction_id_list")
    settings = column(row, "kwargs", kind=(list, tuple))
    if not ids or len(settings) != len(ids):
        raise NotThisSet(f"has {len(ids)} instructions and {len(settings)} 'kwargs'")
    if not all(isinstance(each, Mapping) for each in settings):
        raise NotThisSet("'kwargs' must be a list of objects")
    given = [
        {name: value for name, value in each.items() if value is not None} for each in settings
    ]
    metadata = {"instruction_id_list": ids, "kwargs": given, "prompt_text": prompt, **more}
    return Problem({"prompt": prompt}, metadata=metadata)


_COLUMNS = ("prompt", "instruction_id_list", "kwargs")
standard_sets.add(
    "ifeval",
    StandardSet(
        "25 kinds of instructions that a program verifies; 541 prompts",
        ifeval,
        columns=_COLUMNS,
        names=("prompt",),
        template="{{ prompt }}",
        reward="ifbench",
        files=("ifeval_input_data.jsonl", "data/train-*.parquet", "input_data.jsonl"),
        hub=("google/IFEval",),
    ),
)
standard_sets.add(
    "ifbench",
    StandardSet(
        "58 others that models have not been trained on",
        ifbench,
        columns=_COLUMNS,
        names=("prompt",),
        template="{{ prompt }}",
        reward="ifbench",
        files=("data/train-*.parquet", "IFBench_test.jsonl"),
        hub=("allenai/IFBench_test",),
        package=("ifbench", "data/IFBench_test.jsonl", "ifbench"),
    ),
)
