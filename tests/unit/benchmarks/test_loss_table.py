"""The script of the results page: what it would run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from arguments.parse import parse_args
from benchmarks.loss_table import Result, command_line_of, command_of, finished, is_further, rows
from slime_like.advantages import TurnEstimator, advantage_estimators
from tests.paths import ROOT
from tests.unit.losses.loss_cases import OF_SINGLE_RESPONSES
from tests.unit.scripts.test_example_command_lines import warm_start_files


def test_all_that_is_registered_has_a_row_but_the_supervised_loss() -> None:
    first = [row for row in rows() if not is_further(row)]
    assert sorted(row.name for row in first if row.kind == "losses") == [
        n for n in OF_SINGLE_RESPONSES if n != "cross_entropy"
    ]
    assert sorted(row.name for row in first if row.kind == "estimators") == [
        name for name, entry in advantage_estimators.items() if not isinstance(entry, TurnEstimator)
    ], "those by turn are of agents: tests/unit/advantages/test_turns.py"
    assert len({(row.kind, row.label) for row in rows()}) == len(rows())


def test_every_row_is_a_right_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_start_files(tmp_path)
    monkeypatch.chdir(ROOT)
    folders = set()
    for row in rows():
        words = command_of(row, 48, tmp_path / "sft/hf", tmp_path)
        assert words[1] == "train.py"
        config = parse_args(words[2:], 1)
        assert not [w for w in config.warnings if "gmpo " not in w and "gdpo " not in w], row
        assert config.algorithm.policy_loss_type == (row.name if row.kind == "losses" else "ppo")
        folders.add(words[-1])
    shared = {row.flags for row in rows() if row.kind == "losses"} & {
        row.flags for row in rows() if row.kind == "estimators"
    }
    assert len(folders) == len(rows()) - len(shared), "only rows that are one run share a folder"


def test_a_finished_run_counts_as_long_as_its_command_line_is_the_same(tmp_path: Path) -> None:
    row, model = rows()[0], tmp_path / "sft/hf"
    folder = Path(command_of(row, 48, model, tmp_path)[-1])
    folder.mkdir(parents=True)
    words = command_line_of(row, 48, model, tmp_path)
    result = Result(
        **asdict(row),
        before=0.1,
        after=0.2,
        clipped=None,
        rollouts=48,
        cpu_s=1.0,
        command=words,
        date="2000-01-01",
    )
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    assert finished(row, 48, model, tmp_path) == result
    assert (
        finished(row, 49, model, tmp_path) is None
        and finished(rows()[1], 48, model, tmp_path) is None
    )
