"""What runs are called in reports and plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.metrics.run_names import run_names
from slime_like.report.read import read_run
from tests.unit.report.runs import write_run


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/a/x", "/a/y"], ["x", "y"]),
        (["/a/run", "/b/run"], ["a/run", "b/run"]),
        (["/a/run", "/a/run"], ["run (1)", "run (2)"]),
        (["/a/my_task/outputs"], ["my_task/outputs"]),
        (["/a/demo/sft", "/a/demo/rl"], ["demo/sft", "demo/rl"]),
        (["/a/first", "/a/my_task/outputs"], ["a/first", "my_task/outputs"]),
        (["/outputs"], ["outputs"]),
        (["/run/outputs"], ["run/outputs"]),
    ],
)
def test_names_tell_runs_apart_and_say_something(folders: list[str], names: list[str]) -> None:
    assert run_names([Path(folder) for folder in folders]) == names


def test_a_report_has_the_name_of_the_project(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "my_task/outputs")).name == "my_task/outputs"
