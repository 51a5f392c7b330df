"""The first process of an episode's program."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime_like.agents.command import _BOOT
from slime_like.rewards import confinement


@pytest.mark.parametrize("namespaces", [False, True])
def test_a_program_outlives_the_thread_that_started_it(tmp_path: Path, namespaces: bool) -> None:
    """Episodes go on in the next rollout, which may be another thread."""
    if namespaces and (reason := confinement.missing().get("namespaces")):
        pytest.skip(reason)
    folder = tmp_path / "episodes" / "one"
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-I", "-S", "-c", _BOOT, confinement.package_root()),
        *(str(folder.parent) if namespaces else "", str(folder)),
        *("sh", "-c", "echo begun > begun; sleep 1; exit 3"),
    ]
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(command, start_new_session=True))
        while started[0].poll() is None and not (folder / "begun").exists():
            threading.Event().wait(0.01)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait(timeout=60) == 3
