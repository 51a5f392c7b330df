"""What a running run is doing, and what ended one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_like.cli.dump import dump, main_thread, ranges
from slime_like.distributed.stacks import FOLDER, read_rank
from slime_like.report.alerts import alerts
from slime_like.report.read import read_run
from tests.e2e.helpers import Workspace
from tests.e2e.programs import ROOT, TrainServer

RANK = """
import sys, time
from pathlib import Path
from slime_like.distributed.stacks import StackFile
def waits_for_others():
    print("ready", flush=True), sys.stdin.read()  # one line: a rank is there once it is read
file = StackFile(Path(sys.argv[1]), int(sys.argv[2]))
waits_for_others()
file.close()
"""


def start(folder: Path, rank: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(folder), str(rank)]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_ranks_at_one_place_are_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They continue afterwards, and their files stay; one that is stopped is named."""
    ranks = [start(tmp_path, rank) for rank in range(3)]
    folder = tmp_path / FOLDER
    try:
        assert dump(folder, 20.0) == 0
        shown = capsys.readouterr().out
        assert "ranks 0-2, innermost call first" in shown and shown.count("waits_for_others") == 1
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert dump(folder, 2.0) == 1
        assert f"rank 1 (process {ranks[1].pid}): no answer in 2 s" in capsys.readouterr().out
        os.kill(ranks[1].pid, signal.SIGCONT)
    finally:
        for process in ranks:
            process.communicate("")
    assert [process.returncode for process in ranks] == [0, 0, 0]
    assert "waits_for_others" in (folder / "rank0.txt").read_text()
    assert dump(folder, 1.0) == 2
    assert "no rank of a run is running" in capsys.readouterr().err


def test_a_number_that_another_process_has_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets no signal, which would end it."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    folder = tmp_path / FOLDER
    folder.mkdir()
    host = os.uname().nodename
    (folder / "rank0.txt").write_text(
        f'{{"rank": 0, "host": "{host}", "process": {sleeper.pid}, "started": 1.0}}\n'
    )
    try:
        assert dump(folder, 1.0) == 2
        time.sleep(0.1)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_other_hosts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for rank in range(8, 16):
        (folder / f"rank{rank}.txt").write_text(
            f'{{"rank": {rank}, "host": "node1", "process": 1, "started": 1.0}}\n'
        )
    assert dump(folder, 1.0) == 0
    assert "ranks 8-15 are on node1: run it there" in capsys.readouterr().out


def test_words() -> None:
    assert ranges([5, 0, 2, 1]) == "0-2, 5"
    text = (
        'Thread 0x1 (most recent call first):\n  File "a"\n\nCurrent thread 0x2 (most\n  File "b"\n'
    )
    assert main_thread(text) == '  File "b"'


def test_a_run_that_an_error_ends_leaves_it(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """In its report, without the password of an address. A run that ended leaves no stacks."""
    reward = tmp_path / "reward.py"
    reward.write_text("def fails(args, sample):\n    raise ValueError('http://me:secret@host/')\n")
    out = tmp_path / "out"
    flags = work.flags(out, custom_rm_path=f"{reward}:fails", max_failed_samples=0.5)
    server.train(flags, tmp_path / "log").error()
    (out / "metrics.jsonl").touch()
    errors = [each["text"] for each in alerts(read_run(out)) if each["level"] == "error"]
    assert len(errors) == 1 and "more than --max-failed-samples 0.5" in errors[0]
    assert "secret" not in (out / "error.txt").read_text()
    assert not (out / FOLDER).exists()
    assert read_rank(out / FOLDER / "rank0.txt") is None
    server.train(work.flags(out, num_rollout=1), tmp_path / "log2").ok()
    assert not (out / "error.txt").exists()
