"""Trackers: TensorBoard's files hold the numbers of metrics.jsonl, and a tracker that fails or
hangs is reported once and stops nothing. Those of other packages are in tests/see."""

from __future__ import annotations

import importlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from arguments.parse import parse_args
from arguments.schema import LoggingConfig
from slime_like.metrics.logger import MetricsLogger, read_metrics
from slime_like.metrics.trackers.background import BackgroundTracker, TrackerSet
from slime_like.metrics.trackers.base import TrackerContext, trackers
from slime_like.metrics.trackers.samples import COLUMNS
from slime_like.text import mask_argv
from slime_like.trainer.run_record import settings_by_flag
from tests.unit.command_lines import complete
from tests.unit.report.runs import sample

ROWS = {
    0: {"eval/heldout/mean": 0.25},
    1: {"train/loss": 0.1 + 0.2, "rollout/reward_mean": 1e-12},
    2: {"train/loss": math.nan, "rollout/reward_mean": -3.0},
}
CONFIG = {"--lr": 1e-3, "--tracker": ["wandb"]}


def context(folder: Path, *, resumed: bool = False, **flags: Any) -> TrackerContext:
    return TrackerContext(LoggingConfig(**flags), folder, CONFIG, resumed)


def write(folder: Path, name: str, **flags: Any) -> None:
    """ROWS by the logger, to metrics.jsonl, TensorBoard and the tracker `name`."""
    given = TrackerSet([name], context(folder, **flags))
    with MetricsLogger(folder, folder / "tensorboard", trackers=given) as logger:
        for step, values in ROWS.items():
            logger.log(step, values)


def assert_same(found: Mapping[tuple[str, int], float]) -> None:
    wanted = {(name, step): v for step, row in ROWS.items() for name, v in row.items()}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == value or (math.isnan(found[key]) and math.isnan(value)), key


def jsonl_numbers(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (name, int(row["step"])): value
        for row in read_metrics(folder / "metrics.jsonl")
        for name, value in row.items()
        if name not in ("step", "time")
    }


def tensorboard_numbers(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {(n, e.step): e.value for n in board.Tags()["scalars"] for e in board.Scalars(n)}


def test_tensorboard_holds_them_as_float32(tmp_path: Path) -> None:
    import numpy

    write(tmp_path, "jsonl")
    found = tensorboard_numbers(tmp_path)
    wanted = jsonl_numbers(tmp_path)
    assert found.keys() == wanted.keys()
    assert numpy.array_equal(
        [found[key] for key in wanted], numpy.float32(list(wanted.values())), equal_nan=True
    )


class Recorder:
    """A tracker of a user's. fails_at: the step whose record raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.files: list[Path] = []
        self.finished = False
        self._fails_at = fails_at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise RuntimeError("the disk of https://user:secret@host is full")
        self.steps.append(step)

    def attach(self, path: Path) -> None:
        self.files.append(path)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], None]]:
    names: list[str] = []

    def add(name: str, factory: Any) -> None:
        trackers.add(name, factory)
        names.append(name)

    yield add
    for name in names:
        trackers.remove(name)


def test_one_of_a_users_gets_everything_in_order(
    tmp_path: Path, registered: Callable[[str, Any], None]
) -> None:
    own = Recorder()
    registered("own", lambda context: own)
    given = TrackerSet(["own"], context(tmp_path))
    with MetricsLogger(tmp_path, trackers=given) as logger:
        for step in range(50):
            logger.log(step, {"a": step})
        logger.attach(tmp_path / "report.png")
    assert own.steps == list(range(50)) and own.finished
    assert own.files == [tmp_path / "report.png"]


class SampleRecorder(Recorder):
    """One that takes tables, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Any] = {}

    def log_samples(self, step: int, rows: Any) -> None:
        self.tables[step] = rows


def test_tables_of_samples_go_to_those_that_take_them(
    tmp_path: Path, registered: Callable[[str, Any], None]
) -> None:
    with_tables, without = SampleRecorder(), Recorder()
    registered("tables", lambda context: with_tables)
    registered("none", lambda context: without)
    samples = [sample(0, number, "x" * 3000, 0.5) for number in range(20)]
    given = TrackerSet(["tables", "none"], context(tmp_path))
    with MetricsLogger(tmp_path, trackers=given) as logger:
        for step in range(1, 31):
            logger.trackers.log_samples(step, [object(), *samples])
    assert list(with_tables.tables) == [*range(1, 11), 20, 30] and without.finished
    rows = with_tables.tables[20]
    assert len(rows) == 16 and set(map(len, rows)) == {len(COLUMNS)}
    first = dict(zip(COLUMNS, rows[0]))
    assert (first["rollout"], first["reward"], first["prompt"]) == (20, 0.5, "say it:")
    assert first["response"] == "x" * 2000 and first["tokens"] == 3000


def test_one_that_fails_is_reported_once(
    tmp_path: Path, registered: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder(fails_at=3), Recorder()
    registered("bad", lambda context: bad)
    registered("good", lambda context: good)
    with (
        caplog.at_level(logging.WARNING),
        MetricsLogger(tmp_path, trackers=TrackerSet(["bad", "good"], context(tmp_path))) as logger,
    ):
        for step in range(10):
            logger.log(step, {"a": step})
    assert bad.steps == [0, 1, 2] and good.steps == list(range(10))
    assert len(jsonl_numbers(tmp_path)) == 10
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "tracker bad failed" in warnings[0]
    assert "secret" not in warnings[0]


def test_one_that_is_not_installed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        importlib.import_module("a_tracker_that_nobody_has")

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("absent", make)
        tracker.end()
        tracker.join(30)
    assert ["a_tracker_that_nobody_has" in r.getMessage() for r in caplog.records] == [True]


def test_one_that_hangs_does_not_hold_the_run(
    tmp_path: Path, registered: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hang(context: TrackerContext) -> Recorder:
        release.wait(60)
        return Recorder()

    registered("hanging", hang)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        given = TrackerSet(["hanging"], context(tmp_path), finish_s=0.1)
        with MetricsLogger(tmp_path, trackers=given) as logger:
            for step in range(1200):  # more than its queue holds
                logger.log(step, {"a": step})
    assert time.monotonic() - begun < 30
    release.set()
    messages = [record.getMessage() for record in caplog.records]
    assert ["does not keep up" in m for m in messages] == [True, False]
    assert "has not ended in time" in messages[1]


def test_one_that_catches_up_is_finished(
    tmp_path: Path, registered: Callable[[str, Any], None]
) -> None:
    release, own = threading.Event(), Recorder()

    def wait(context: TrackerContext) -> Recorder:
        release.wait(60)
        return own

    registered("slow", wait)
    given = TrackerSet(["slow"], context(tmp_path), finish_s=0.0)
    for step in range(1200):  # more than its queue holds
        given.log(step, {"a": step})
    given.close()
    assert not own.finished
    release.set()
    begun = time.monotonic()
    given.close(finish_s=60)
    assert own.finished and len(own.steps) == 1000 and time.monotonic() - begun < 30


def test_a_resumed_run_finds_its_ids(tmp_path: Path) -> None:
    first = context(tmp_path)
    assert first.saved_id("mlflow") is None
    first.save_id("mlflow", "abc")
    first.save_id("wandb", "xyz")
    resumed = context(tmp_path, resumed=True)
    assert (resumed.saved_id("mlflow"), resumed.saved_id("wandb")) == ("abc", "xyz")
    assert context(tmp_path).saved_id("mlflow") is None


def test_slimes_spellings(tmp_path: Path) -> None:
    words = (
        "--use-wandb --wandb-project p --wandb-group g --wandb-team t --wandb-mode offline "
        "--tracker mlflow wandb"
    )
    config = parse_args([*complete(tmp_path), *words.split(), "--wandb-key", "secret-key"], 1)
    flags = config.logging
    assert flags.trackers == ("mlflow", "wandb")
    assert (flags.tracker_project, flags.tracker_run_name, flags.wandb_team) == ("p", "g", "t")
    values, changed = settings_by_flag(config)
    assert "secret-key" not in json.dumps(values) and values["--tracker-project"] == "p"
    assert "--tracker-project" in changed and "--no-plot" not in changed
    assert "secret-key" not in json.dumps(mask_argv(config.argv)) and "--wandb-key" in mask_argv(
        config.argv
    )
