"""A user's own reward that misbehaves: what it prints, starts, raises and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.rewards.grader import Grader
from slime_like.rewards.pool import MAX_OUTPUT
from slime_like.types import SampleStatus
from tests.unit.rewards.test_grader import PROGRAM, ROOT, is_alive, make, pids, wait_until

pytestmark = pytest.mark.timeout(300)


def write(folder: Path, source: str) -> str:
    (folder / "reward.py").write_text(source)
    return f"{folder / 'reward.py'}:score"


def test_what_a_reward_prints_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        "def score(args, sample):\n    print('\\x1b[31mred')\n    print('x' * 10_000_000)\n"
        "    return 1\n",
    )
    with Grader(custom_rm_path=path, rm_num_workers=1, rm_timeout_s=100) as grader:
        assert [s.reward for s in grader.grade([make(i) for i in range(3)])] == [1.0] * 3
    shown = capsys.readouterr().err
    assert "\\x1b[31mred\n" in shown and "\x1b" not in shown
    assert MAX_OUTPUT <= len(shown) < MAX_OUTPUT + 1000
    assert f"shown up to {MAX_OUTPUT} bytes" in shown


def test_reasons_are_clean(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import json\ndef score(args, sample):\n    if sample.index == 0:\n"
        "        raise ValueError('a\\nb \\x1b[2J \\ud800 http://u:p@h/')\n"
        "    if sample.index == 1:\n        return json.loads('{')\n    return float('inf')\n",
    )
    with Grader(custom_rm_path=path, rm_num_workers=1, rm_timeout_s=100) as grader:
        first, second, third = grader.grade([make(i) for i in range(3)])
    assert first.status == second.status == SampleStatus.FAILED
    reason = first.metadata["failure"]
    assert reason.startswith(r"the reward raised ValueError: a b \x1b[2J \ud800 http://***@h/ (")
    assert reason.endswith("reward.py:4)")
    assert "JSONDecodeError: Expecting property name" in second.metadata["failure"]
    assert second.metadata["failure"].endswith("reward.py:6)")
    assert third.metadata["failure"] == "the reward is inf"


DAEMON = """
import os, time
def score(args, sample):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open({pids!r}, "a") as file:
                file.write(f"{{os.getpid()}} ")
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not os.path.exists({pids!r}) or not os.path.getsize({pids!r}):
        time.sleep(0.01)
    {then}
    return 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")
@pytest.mark.parametrize("then", ["pass", "os._exit(3)"])
def test_daemons_end_with_the_worker(tmp_path: Path, then: str) -> None:
    """Of a double fork, in their own session; also where the worker dies."""
    path = write(tmp_path, DAEMON.format(pids=str(tmp_path / "pids"), then=then))
    with Grader(custom_rm_path=path, rm_num_workers=1, rm_timeout_s=100) as grader:
        (graded,) = grader.grade([make(0)])
    if then != "pass":
        assert graded.metadata["failure"] == "the reward process died (exit code 3)"
    (daemon,) = pids(tmp_path / "pids")
    wait_until(lambda: not is_alive(daemon), 60)


@pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")
def test_daemons_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path, DAEMON.format(pids=str(tmp_path / "pids"), then="time.sleep(1000)"))
    run = subprocess.Popen([sys.executable, "-c", PROGRAM, path], cwd=ROOT)
    try:
        wait_until(lambda: pids(tmp_path / "pids"), 100)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not any(map(is_alive, pids(tmp_path / "pids"))), 60)
    assert os.path.exists(tmp_path / "pids")
