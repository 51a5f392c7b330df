"""One run at a time writes to a folder: real processes that hold, die, are silent or race."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime_like.checkpoints.lock import (
    LOCK,
    FolderInUse,
    FolderLock,
    confirm_held,
    hold_folders,
    this_process,
)
from slime_like.errors import RunError
from tests.paths import ROOT

HOLD = """
import sys
from slime_like.checkpoints.lock import FolderLock
lock = FolderLock(sys.argv[1], "--save")
lock.acquire()
print("held", flush=True)
sys.stdin.readline()
lock.release()
"""
RACE = """
import sys, time
from slime_like.checkpoints.lock import FolderInUse, FolderLock
lock = FolderLock(sys.argv[1], "--save")
print("ready", flush=True)
sys.stdin.readline()
try:
    lock.acquire()
except FolderInUse:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    lock.release()
"""


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(HOLD, folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def foreign(folder: Path, age_s: float = 0.0) -> Path:
    """The lock of a run on another machine."""
    path = folder / LOCK
    path.write_text(
        json.dumps({**this_process(), "host": "other", "machine": "other", "token": "t"})
    )
    written = path.stat().st_mtime - age_s
    os.utime(path, (written, written))
    return path


def test_a_folder_that_a_living_run_holds_is_refused(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        lock = FolderLock(tmp_path, "--save")
        with pytest.raises(
            FolderInUse, match=rf"^--save {tmp_path}: in use by process {process.pid} on .* started"
        ):
            lock.acquire()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
        lock.acquire()
        lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_run_is_taken_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        lock = FolderLock(tmp_path, "--save", stale_s=3600)
        lock.acquire()
        assert len(caplog.messages) == 1 and f"process {process.pid} on" in caplog.messages[0]
        assert "ended without releasing it; its lock is taken over" in caplog.messages[0]
        lock.release()


def test_a_run_that_is_no_more_than_its_status_is_dead(tmp_path: Path) -> None:
    """A zombie: killed, and not waited for."""
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lock = FolderLock(tmp_path, "--save", stale_s=3600)
        lock.acquire()
        lock.release()


def test_an_old_lock_of_another_machine_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign(tmp_path, age_s=100)
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.release()
    assert len(caplog.messages) == 1 and "on other started" in caplog.messages[0]
    assert "has given no sign of life for 100 s" in caplog.messages[0]


def test_a_silent_run_of_another_machine_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign(tmp_path)
    lock = FolderLock(tmp_path, "--save", heartbeat_s=0.2, stale_s=1.0)
    lock.acquire()
    lock.release()
    assert ["waiting up to 1 s" in caplog.messages[0], "taken over" in caplog.messages[1]] == [
        True,
        True,
    ]


def test_a_lock_of_the_future_is_waited_for_as_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the file server was set back by an hour."""
    foreign(tmp_path, age_s=-3600)
    lock = FolderLock(tmp_path, "--save", heartbeat_s=0.2, stale_s=1.0)
    started = time.monotonic()
    lock.acquire()
    lock.release()
    assert 1.0 <= time.monotonic() - started < 20
    assert "waiting up to 1 s" in caplog.messages[0] and "for 1 s" in caplog.messages[1]


def test_a_run_of_another_machine_that_shows_a_sign_of_life_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign(tmp_path, age_s=1)
    lock = FolderLock(tmp_path, "--save", stale_s=3600)

    def show_life(record: logging.LogRecord) -> bool:
        os.utime(path)  # while it waits
        return True

    monkeypatch.setattr(logging.getLogger("slime_like.checkpoints.lock"), "filters", [show_life])
    with pytest.raises(FolderInUse, match="on other started"):
        lock.acquire()
    assert path.exists()


def test_one_of_many_takes_a_stale_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as dead:
        dead.kill()
        dead.wait()
    racing = [start(RACE, tmp_path) for _ in range(6)]
    try:
        for process in racing:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
        for process in racing:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        results = [process.stdout.readline() for process in racing if process.stdout is not None]
        assert sorted(results) == ["held\n"] + 5 * ["refused\n"]
    finally:
        for process in racing:
            process.kill()
            process.communicate()


def test_a_run_whose_lock_was_taken_is_reported_before_it_saves(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "--save", heartbeat_s=3600)
    lock.acquire()
    confirm_held(tmp_path)
    foreign(tmp_path)
    with pytest.raises(RunError, match=r"taken over by process .* on other"):
        confirm_held(tmp_path)
    lock.release()
    assert (tmp_path / LOCK).exists(), "it is the other run's"
    confirm_held(tmp_path)  # of nobody here any more


def test_a_heartbeat_shows_that_it_lives_and_stops_when_the_lock_is_gone(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "--save", heartbeat_s=0.05)
    lock.acquire()
    os.utime(lock.path, (0, 0))
    waiting = threading.Event()
    while lock.path.stat().st_mtime == 0:
        waiting.wait(0.01)
    lock.path.unlink()
    while lock.lost is None:
        waiting.wait(0.01)
    with pytest.raises(RunError, match=f"its lock {LOCK} was removed"):
        lock.confirm()
    lock.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "[" * 10_000])
def test_a_garbled_lock_is_judged_by_its_age(tmp_path: Path, text: str) -> None:
    path = tmp_path / LOCK
    path.write_text(text)
    os.utime(path, (0, 0))
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.release()


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(OSError, match="is not a regular file; remove it"):
        FolderLock(tmp_path, "--save").acquire()


def test_two_names_of_one_folder_are_one_lock(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with hold_folders([("--save", tmp_path / "a"), ("--output-dir", tmp_path / "b")]):
        assert [path.name for path in (tmp_path / "a").iterdir()] == [LOCK]
    assert list((tmp_path / "a").iterdir()) == []


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def without_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links."""

    def link(source: Path, target: Path) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("without_links")
def test_a_file_system_without_hard_links(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    lock.confirm()
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path, "--save").acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_links")
def test_the_lock_of_a_faster_run_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the dead one's between our look and the renaming."""
    dead = FolderLock(tmp_path, "--save")
    foreign(tmp_path)
    living = json.dumps(this_process())
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        source.write_text(living)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert not dead._set_aside((tmp_path / LOCK).read_text())
    assert (tmp_path / LOCK).read_text() == living
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
