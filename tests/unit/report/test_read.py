"""What slime-like report reads of a run's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slime_like.metrics.timeline import PhaseTimeline
from slime_like.report.alerts import alerts
from slime_like.report.page import runs_data
from slime_like.report.read import read_run, state_of
from slime_like.report.rollouts import read_samples
from tests.paths import ROOT
from tests.unit.report.runs import run_with, write_run


def test_stacks_and_traces(tmp_path: Path) -> None:
    """The last request of each rank; none of a rank that nobody asked."""
    write_run(tmp_path)
    for name in ("stacks", "profile"):
        (tmp_path / name).mkdir()
    before = state_of(tmp_path)
    (tmp_path / "stacks/rank0.txt").write_text('{"rank": 0}\n--- one\nold\n--- two\nnew\n')
    (tmp_path / "stacks/rank1.txt").write_text('{"rank": 1}\n')
    (tmp_path / "profile/rank0_rollouts1-2.json.gz").touch()
    (run,) = runs_data([read_run(tmp_path)])["runs"]
    assert run["stacks"] == {0: "--- two\nnew"}
    assert run["profile"] == ("rank0_rollouts1-2.json.gz",)
    assert state_of(tmp_path) != before


def test_the_program_imports_neither_torch_nor_the_trainer(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = (
        "import sys; from slime_like.report.__main__ import main; "
        f"sys.argv = ['report', {str(tmp_path)!r}]; status = main(); "
        "print(status, sorted({'torch', 'transformers', 'slime_like.trainer', 'slime_like.rollout'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert (tmp_path / "report.html").is_file()


def test_a_run_inside_another_is_not_read_with_it(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    write_run(tmp_path / "second", rollouts=2)
    assert read_samples([read_run(tmp_path)], 100).columns["rollout"] == [1, 1]


def test_the_timeline_is_what_the_page_reads(tmp_path: Path) -> None:
    timeline = PhaseTimeline(tmp_path, 3)
    for phase in ("generate", "after generate", "train", "after train", "end"):
        timeline.enter(phase)
    run_with(tmp_path, [{"a": 1.0}])
    found = read_run(tmp_path).timeline
    assert list(found) == [3] and [row[0] for row in found[3]] == ["generate", "train"]
    assert all(row[2] >= 0 and row[3] >= 0 for row in found[3])


def test_a_fresh_run_replaces_the_timeline(tmp_path: Path) -> None:
    for rank in (0, 1):
        PhaseTimeline(tmp_path, rank)
    (tmp_path / "timeline/rank0.jsonl").write_text('["of an earlier run", 0, 1, 1]\n')
    PhaseTimeline(tmp_path, 0, resumed=False, world_size=1)
    (left,) = (tmp_path / "timeline").iterdir()
    assert left.name == "rank0.jsonl" and not left.read_text()


def test_a_run_that_ended_early_and_its_errors(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("error: the engine is gone\n")
    found = run_with(tmp_path, [{"a": 1.0}], config={"--num-rollout": 5})
    assert [alert["text"][:15] for alert in found] == [
        "the engine is g",
        "1 of 5 rollouts",
    ]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "slime_like.report", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "has no metrics.jsonl" in done.stderr


def test_certificates(tmp_path: Path) -> None:
    """The newest is last; a file that is something else is none; an alert is over when the last
    certificate holds."""
    write_run(tmp_path)
    folder = tmp_path / "certificates"
    folder.mkdir()
    before = state_of(tmp_path)
    row = {"sites": {"layers.0": {"engine": [1e-7, 1e-6]}, "norm": {"engine": [0.5, 1e-6]}}}
    found = {"rollout": 2, "holds": False, "findings": [{"text": "engine: norm: x"}], **row}
    (folder / "rollout_2.json").write_text(json.dumps(found))
    (folder / "rollout_9.json").write_text("[1]")
    run = read_run(tmp_path)
    (shown,) = run.certificates
    assert (shown["holds"], shown["texts"]) == (False, ["engine: norm: x"])
    assert shown["differences"] == {"engine": ["norm", 0.5, 1e-6]}
    assert state_of(tmp_path) != before
    (alert,) = [a for a in alerts(run) if a["metric"] == "certificate/findings"]
    assert alert["text"] == "rollout 2: engine: norm: x" and not alert["over"]
    (folder / "rollout_10.json").write_text(json.dumps({"rollout": 10, "holds": True, **row}))
    run = read_run(tmp_path)
    assert [c["rollout"] for c in run.certificates] == [2, 10]
    assert next(a for a in alerts(run) if a["metric"] == "certificate/findings")["over"]
