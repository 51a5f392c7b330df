"""What an earlier run left in --output-dir is set aside, not overwritten, mixed or lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from slime_like.metrics.logger import read_metrics
from slime_like.report.read import read_run
from slime_like.report.rollouts import read_samples
from slime_like.trainer import earlier_run
from slime_like.trainer.launch import shared_output_dir
from tests.unit.command_lines import complete
from tests.unit.report.runs import write_run

USERS = (
    *("engines/__init__.py", "certificates/ca.pem", "profile/me.txt"),
    *("notes.txt", "rollouts/mine.csv", "ck/iter_0000001/x.json", "hf/config.json", "mlflow.db"),
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run with recorded rollouts, an image, logs, and files that are no run's."""
    out = tmp_path / "out"
    write_run(out, rollouts=2)
    for name in (
        *USERS,
        "engines/0.log",
        "stacks/rank0.txt",
        "report.html",
        "rollouts/images/a.image",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    return out


def config(out: Path, *more: str) -> RunConfig:
    recorded = ("--save-debug-rollout-data", str(out / "rollouts/{rollout_id}"))
    argv = complete(out.parent, "--output-dir", str(out), *more)
    return parse_args(argv if "--load-debug-rollout-data" in more else [*argv, *recorded], 1)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_finds_none_of_the_earlier_one(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files(out)
    with caplog.at_level(logging.INFO):
        assert shared_output_dir(config(out)) == out
    (place,) = out.glob("earlier-*")
    assert re.fullmatch(r"earlier-\d{8}-\d{6}", place.name)
    assert files(place) == before - set(USERS)
    assert files(out) - {f"{place.name}/{name}" for name in files(place)} == set(USERS)
    (line,) = [record.getMessage() for record in caplog.records if "earlier" in record.getMessage()]
    assert line == (
        f"{out} had an earlier run, whose metrics, rollouts and logs are now in {place}; "
        "checkpoints stay (--load continues from one)"
    )
    write_run(out, rollouts=1)
    assert set(read_samples([read_run(out)], 100).columns["rollout"]) == {1}
    assert set(read_samples([read_run(place)], 100).columns["rollout"]) == {1, 2}
    shared_output_dir(config(out))
    assert len(list(out.glob("earlier-*"))) == 2, "within one second as well"


def test_the_report_of_an_earlier_run_takes_no_rollouts_of_the_next(out: Path) -> None:
    """Its run.json still names the folder that the next one records to."""
    record = f'{{"config": {{"--save-debug-rollout-data": "{out}/rollouts/{{rollout_id}}"}}}}'
    (out / "run.json").write_text(record)
    shared_output_dir(config(out))
    (place,) = out.glob("earlier-*")
    write_run(out, rollouts=4)
    assert set(read_samples([read_run(place)], 100).columns["rollout"]) == {1, 2}


def test_where_the_earlier_run_recorded(out: Path) -> None:
    """Elsewhere in the folder than the new one."""
    (out / "rollouts").rename(out / "old")
    record = f'{{"config": {{"--save-debug-rollout-data": "{out}/old/{{rollout_id}}"}}}}'
    (out / "run.json").write_text(record)
    shared_output_dir(config(out))
    assert files(out / "old") == {"mine.csv"}


def test_resuming_moves_nothing(out: Path) -> None:
    (out / "ck/latest_checkpointed_iteration.txt").write_text("1")
    before = files(out)
    shared_output_dir(config(out, "--load", str(out / "ck")))
    assert files(out) == before
    shared_output_dir(config(out, "--load", str(out / "ck"), "--finetune"))
    assert len(list(out.glob("earlier-*"))) == 1


def test_a_checkpoint_of_weights_only_starts_a_new_run(out: Path) -> None:
    """That is known only when it is loaded; what the new run has written by then stays."""
    (out / "run.json").write_text("new")
    earlier_run.set_aside_earlier_run(config(out).debug, out, begun=True)
    (place,) = out.glob("earlier-*")
    assert {"metrics.jsonl", "report.html", "rollouts/1.json"} <= files(place)
    assert {"run.json", "stacks/rank0.txt", "engines/0.log"} <= files(out)


def test_a_folder_without_a_run_stays_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shared_output_dir(config(out))
    assert not out.exists()
    out.mkdir()
    for name in ("metrics.jsonl", "run.json", "error.txt"):  # of a run that failed at its start
        (out / name).touch()
    shared_output_dir(config(out))
    assert files(out) == {"metrics.jsonl", "run.json", "error.txt"}


def test_rollouts_that_the_new_run_reads_stay(out: Path) -> None:
    template = str(out / "rollouts/{rollout_id}")
    shared_output_dir(config(out, "--load-debug-rollout-data", template, "--debug-train-only"))
    assert (out / "rollouts/1.json").is_file() and (out / "rollouts/images/a.image").is_file()
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("way", ["file", "link"])
def test_they_stay_however_they_are_named(out: Path, way: str) -> None:
    template = str(out / "rollouts/1.json")
    if way == "link":
        (out.parent / "link").symlink_to(out)
        template = str(out.parent / "link/rollouts/{rollout_id}")
    shared_output_dir(config(out, "--load-debug-rollout-data", template, "--debug-train-only"))
    assert (out / "rollouts/1.json").is_file() and not (out / "metrics.jsonl").exists()


def test_a_start_without_load_costs_a_resumed_run_nothing(out: Path) -> None:
    """It was stopped before its first metrics, and the right command is given next."""
    (out / "ck/latest_checkpointed_iteration.txt").write_text("1")
    (out / "run.json").write_text(json.dumps({"config": {"--save": str(out / "ck")}}))
    before = files(out)
    shared_output_dir(config(out))
    (out / "run.json").write_text("{}")
    (out / "metrics.jsonl").touch()
    assert len(list(out.glob("earlier-*"))) == 1
    earlier_run.put_back(out, str(out / "hf"))
    assert files(out) != before, "another run's"
    shared_output_dir(config(out, "--load", str(out / "ck")))
    assert files(out) == before and (out / "metrics.jsonl").stat().st_size > 0


def test_a_kill_in_the_middle(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it comes, the next start completes the move; a run that resumes takes it back."""
    before = files(out)
    rows = read_metrics(out / "metrics.jsonl")
    run = config(out)
    rename = os.rename
    left = [0]  # moves until the kill

    def interrupted(source: Path, target: Path) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        rename(source, target)

    pristine = out.rename(out.with_name("pristine"))
    for moves in range(100):
        for resumes in (False, True):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(pristine, out)
            left[0] = moves
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", interrupted)
                try:
                    shared_output_dir(run)
                except KeyboardInterrupt:
                    pass
                else:
                    assert moves > 15, "as many files and folders of the run"
                    return
            if resumes:
                earlier_run.put_back(out, None)
                assert files(out) == before and not list(out.glob("earlier-*"))
                continue
            shared_output_dir(run)
            (place,) = out.glob("earlier-*")
            assert not place.name.endswith(earlier_run.UNFINISHED)
            assert files(place) == before - set(USERS)
            assert read_metrics(place / "metrics.jsonl") == rows


def test_a_folder_that_takes_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(out)

    def refused(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match=r"--output-dir .*out: cannot be written: Permission"):
        shared_output_dir(config(out))
    assert files(out) == before
