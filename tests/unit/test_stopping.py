"""Signals: one that comes twice within moments is one, a later one ends the process, and what is left for the script that started a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CATCH = """
import os, signal, sys, time
from slime_like.distributed import signals
signals.REPEAT_S = 0.3
stop = signals.StopConditions(every=None, minutes=None)
stop.catch()
for wait in sys.argv[1:]:
    time.sleep(float(wait))
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.requested(1, lambda flags: flags).words)
"""
AT_ONCE = """
import os, signal, sys
from slime_like.distributed import signals
signals.end_at_once_on_sigterm(int(sys.argv[1]), resumable=sys.argv[2] == "resumable")
os.kill(os.getpid(), signal.SIGTERM)
"""


def run(
    program: str, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("waits", [["0"], ["0", "0"], ["0", "0.05", "0.05"]])
def test_a_signal_that_comes_again_at_once_is_the_same(waits: list[str]) -> None:
    """SLURM sends it to every process, and torchrun passes on what it got."""
    done = run(CATCH, *waits)
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr


def test_a_later_signal_ends_the_process() -> None:
    assert run(CATCH, "0", "0.5").returncode == -15


@pytest.mark.parametrize(
    ("rank", "kind", "status", "left"),
    [(0, "resumable", 75, "75\n"), (0, "lost", 143, "143\n"), (1, "lost", 143, None)],
)
def test_a_signal_before_the_first_rollout(
    tmp_path: Path, rank: int, kind: str, status: int, left: str | None
) -> None:
    file = tmp_path / "status"
    done = run(AT_ONCE, str(rank), kind, environment={"SLIME_LIKE_STATUS_FILE": str(file)})
    assert done.returncode == status
    assert (file.read_text() if file.exists() else None) == left
