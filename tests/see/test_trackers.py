"""The files of W&B (offline), MLflow and Trackio, as the real packages write them, hold the numbers
of metrics.jsonl."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from slime_like.metrics.trackers.samples import COLUMNS
from tests.e2e.helpers import make_workspace
from tests.e2e.programs import torchrun_once
from tests.unit.metrics.trackers.test_trackers import (
    assert_same,
    jsonl_numbers,
    tensorboard_numbers,
    write,
)

Numbers = dict[tuple[str, int], float]
NAMES = {"tracker_project": "p", "tracker_run_name": "first"}


def mlflow_run(folder: Path) -> tuple[Any, Numbers]:
    """The only run of the database in `folder`, and its values by name and step."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("p")
    (run,) = client.search_runs([experiment.experiment_id])
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return run, {(m.key, m.step): m.value for history in histories for m in history}


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, block, place, held = path.read_bytes(), 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:  # the rest of a block is empty
            place += block - place % block
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        held += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield held
            held = b""


def wandb_run(folder: Path) -> tuple[Any, Numbers]:
    """The only offline run in `folder`, and its values; a rollout's last record counts."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: Numbers = {}
    run = None
    deadline = time.monotonic() + 30.0
    records: list[Any] = []
    # the process that writes the file may end its work a little after the run's end
    while not any(r.HasField("exit") for r in records) and time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(data) for data in records_of(path)]
        time.sleep(0.05)
    for record in records:
        if record.HasField("run"):
            run = run or record.run
        if record.HasField("history"):
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "rollout" in items:  # not the plot
                step = int(items.pop("rollout"))
                own = {
                    n: v
                    for n, v in items.items()
                    if n[0] != "_" and not n.startswith(("report/", "samples/"))
                }
                found |= {(n, step): float(json.loads(v)) for n, v in own.items()}
    return run, found


def trackio_numbers(folder: Path) -> Numbers:
    with sqlite3.connect(folder / "trackio" / "p.db") as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    loaded = [(step, json.loads(text)) for step, text in rows]
    return {
        (name, step): float(value)
        for step, values in loaded
        for name, value in values.items()
        if not isinstance(value, dict)  # the plot
    }


def assert_tables(out: Path) -> None:
    """Each tracker has a table of samples for each of three rollouts."""
    saved = [
        json.loads(p.read_text()) for p in sorted(out.glob("mlflow_artifacts/**/samples/*.json"))
    ]
    assert [table["columns"] for table in saved] == [list(COLUMNS)] * 3
    assert [table["data"][0][0] for table in saved] == [1, 2, 3]
    sent = [
        json.loads(p.read_text()) for p in out.glob("wandb/offline-run-*/**/samples*.table.json")
    ]
    by_rollout = {table["data"][0][0]: table["data"] for table in sent}
    assert by_rollout == {table["data"][0][0]: table["data"] for table in saved}
    assert all(row[COLUMNS.index("prompt")] for table in saved for row in table["data"])
    with sqlite3.connect(out / "trackio" / "p.db") as connection:
        texts = [text for (text,) in connection.execute("select metrics from metrics")]
    assert sum("samples" in json.loads(text) for text in texts) == 3


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="no mlflow: make see-env")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path, "mlflow", **NAMES)
    run, found = mlflow_run(tmp_path)
    assert run.info.run_name == "first" and run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.001"
    assert_same(found)
    assert_same(jsonl_numbers(tmp_path))


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no wandb: make see-env")
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", "SECRET-key"])
    write(tmp_path, "wandb", wandb_mode="offline", **NAMES)
    run, found = wandb_run(tmp_path)
    assert_same(found)
    assert run.project == "p" and run.display_name.startswith("first_")
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"SECRET" not in path.read_bytes()


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by its import
    pytest.importorskip("trackio", reason="no trackio: make see-env")
    write(tmp_path, "trackio", **NAMES)
    assert_same(trackio_numbers(tmp_path))


def test_all_of_one_run_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py writes to all of them at once; each has one run, and every number of it."""
    for name in ("wandb", "mlflow", "trackio"):
        pytest.importorskip(name, reason=f"no {name}: make see-env")
    out = tmp_path / "out"
    flags = make_workspace(tmp_path / "work").flags(
        out, num_rollout=3, tracker="wandb mlflow trackio", wandb_mode="offline", no_tensorboard=None,
        **NAMES, no_plot=None,
    )  # fmt: skip
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    status, output = torchrun_once(flags, ranks=2, timeout_s=600)
    assert status == 0, output[-3000:]
    wanted = jsonl_numbers(out)
    assert {step for _, step in wanted} == {1, 2, 3} and len(wanted) > 60
    run, found_by_mlflow = mlflow_run(out)
    assert run.info.status == "FINISHED"
    by_tracker = {
        "mlflow": found_by_mlflow,
        "wandb": wandb_run(out)[1],
        "trackio": trackio_numbers(out),
    }
    for name, found in by_tracker.items():
        assert found.keys() == wanted.keys(), name
        for key, value in wanted.items():
            same = found[key] == value or (math.isnan(found[key]) and math.isnan(value))
            assert same, (name, key, found[key], value)
    assert_tables(out)
    board = tensorboard_numbers(out)
    assert board.keys() == wanted.keys()
    for key, value in wanted.items():
        assert numpy.array_equal(board[key], numpy.float32(value), equal_nan=True), key
