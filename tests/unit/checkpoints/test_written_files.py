"""Files that cannot be written, and copies that a killed process left."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.checkpoints.files import writes_to
from slime_like.metrics.logger import MetricsLogger, read_metrics
from slime_like.tinker.api_process import ServerLog
from slime_like.trainer import saved_settings
from slime_like.trainer.launch import write_report
from slime_like.weights.safetensors_reader import INDEX, weight_files
from slime_like.weights.safetensors_writer import save_tensors

FULL = Path("/dev/full")  # every write to it fails, as on a full disk


def test_an_error_names_place_and_flag(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, writes_to("--save-hf", tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value) == (
        f"--save-hf {tmp_path}: cannot be written: No space left on device; make room there, or "
        "name another place"
    )


class SmallDisk(FileIO):
    """A file for which the disk has room for so many bytes."""

    room = 10**6

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self.room])
        self.room -= written
        return written


def test_a_disk_that_is_full_of_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues, with one warning; what waited is written when there is room, also where
    half a line had been."""
    metrics = MetricsLogger(tmp_path)
    disk = metrics._file = SmallDisk(tmp_path / "metrics.jsonl", "ab")
    metrics.log(1, {"a": 1.0})
    disk.room = 20
    for step in (2, 3):
        metrics.log(step, {"a": float(step)})
    assert metrics.row(3) == {"a": 3.0} and metrics.row(1) == {"a": 1.0}
    metrics.amend(3, {"b": 0.5})
    assert [row["step"] for row in read_metrics(metrics.path)] == [1]
    (warning,) = caplog.messages
    assert warning.startswith(
        f"--output-dir {metrics.path}: cannot be written: No space left on device; make room there."
    )
    disk.room = 10**6
    metrics.log(4, {"a": 4.0})
    assert caplog.messages[1:] == [
        f"--output-dir {metrics.path}: can be written again; 2 earlier lines of metrics were added"
    ]
    disk.room = 0
    for step in (5, 6):
        metrics.log(step, {"a": float(step)})
    metrics.close()
    assert caplog.messages[3:] == [
        f"--output-dir {metrics.path}: the metrics of 2 steps, from step 5 on, are lost"
    ]
    rows = read_metrics(metrics.path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[2]["b"] == 0.5


def test_a_disk_that_is_full_of_tensors(tmp_path: Path) -> None:
    """The library of the format has its own error, which named neither file nor flag."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(4096)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG and "a.safetensors" in str(caught.value)


@pytest.mark.skipif(not FULL.exists(), reason="Linux has it")
def test_a_disk_that_is_full_of_the_servers_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = ServerLog(tmp_path / "server.log", maxBytes=10**6, backupCount=1)
    handler.stream.close()
    handler.stream = FULL.open("a", encoding="utf-8")
    for _ in range(3):
        handler.emit(logging.makeLogRecord({"msg": "a request"}))
    handler.stream = None  # closing would try again
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1 and "Traceback" not in reported
    assert reported.startswith(
        f"warning: --server-dir: {tmp_path}/server.log cannot be written: No sp"
    )


@pytest.mark.skipif(not FULL.exists(), reason="Linux has it")
def test_what_fails_in_tensorboards_thread_is_reported_once(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its writer's thread had a traceback printed next to the sentence. Training continues without
    it."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    logger = MetricsLogger(tmp_path, tmp_path / "board")
    assert logger._board is not None
    writer = logger._board.file_writer.event_writer._async_writer  # type: ignore[attr-defined]
    writer._writer._writer = FULL.open("wb", buffering=0)
    for step in range(9):
        logger.log(step, {"a": 1.0})
    logger.close()
    (reported,) = caplog.messages
    assert reported.startswith(f"--tensorboard-dir {tmp_path}/board: cannot be written: No space")
    assert "Traceback" not in capfd.readouterr().err
    assert len(read_metrics(logger.path)) == 9


def test_a_line_is_amended(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": 1.0})
        logger.log(2, {"a": 2.0, "b": float("nan")})
        logger.amend(2, {"eval/x/mean": 0.5})
        logger.log(3, {"a": 3.0})
        assert logger.row(2).keys() == {"a", "b", "eval/x/mean"}
        assert logger.row(9) == {}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_report_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_report(tmp_path, plot=True)  # there are no metrics
    assert f"could not write plot and table of {tmp_path}" in caplog.text


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    make = (
        "from slime_like.checkpoints.scratch import scratch_folder\n"
        "print(scratch_folder('weights_'), flush=True)\n"
    )
    wait = "import sys\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", make + wait],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as alive:
        assert alive.stdout is not None
        kept = alive.stdout.readline().strip()
        with subprocess.Popen(
            [sys.executable, "-c", make + wait],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as killed:
            assert killed.stdout is not None
            left = killed.stdout.readline().strip()
            killed.send_signal(signal.SIGKILL)
        (tmp_path / "weights_of_somebody").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", make],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert not Path(left).exists()
        assert all(Path(path).is_dir() for path in (kept, done.stdout.strip()))
        assert (tmp_path / "weights_of_somebody").is_dir()


def test_an_index_that_leaves_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    for name in ("../other.safetensors", str(tmp_path / "other.safetensors"), "a/b.safetensors"):
        text = json.dumps({"weight_map": {"a": name}})
        (tmp_path / "model" / INDEX).write_text(text)
        with pytest.raises(ValueError, match="which is not a file of this folder"):
            weight_files(tmp_path / "model")


def test_what_changed_in_words() -> None:
    saved = {"--lr": 1, "--eps-clip": 0.2, "--gone": 3}
    assert saved_settings.changes(saved, {"--lr": 1, "--eps-clip": 0.3, "--new": 4}) == [
        "--eps-clip 0.2 -> 0.3"
    ]
    assert saved_settings._without_credentials("https://me:secret@host:80/rm?key=1") == (
        "https://host:80/rm"
    )
