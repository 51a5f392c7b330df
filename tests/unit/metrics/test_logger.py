"""metrics.jsonl and TensorBoard: what is written, what a resumed run keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slime_like.metrics.logger import MetricsLogger, read_metrics, to_json


def test_values_are_kept_exactly_and_flushed(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "new" / "run")
    logger.log(0, {"train/loss": 1 / 3, "train/kl": 1e-17, "rollout/count": 7})
    rows = read_metrics(logger.path)  # before close
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows] == [
        {"step": 0, "train/loss": 1 / 3, "train/kl": 1e-17, "rollout/count": 7.0}
    ]
    assert rows[0]["time"] > 1.6e9
    logger.close()


def test_non_finite_values_are_valid_json_and_come_back(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(4, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.0})
    line = json.loads(
        logger.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert (line["a"], line["b"], line["c"], line["d"]) == ("NaN", "Infinity", "-Infinity", 0.0)
    (row,) = read_metrics(logger.path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (float("inf"), float("-inf"))


def _write(folder: Path, steps: range, value: float, start_step: int = 0) -> Path:
    with MetricsLogger(folder, start_step=start_step) as logger:
        for step in steps:
            logger.log(step, {"x": value + step})
    return logger.path


def test_resume_drops_what_will_be_repeated(tmp_path: Path) -> None:
    path = _write(tmp_path, range(6), 0.0)
    before = path.read_text().splitlines()
    _write(tmp_path, range(3, 5), 100.0, start_step=3)
    after = path.read_text().splitlines()
    assert after[:3] == before[:3]
    assert [(row["step"], row["x"]) for row in read_metrics(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 103.0),
        (4, 104.0),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_run_begins_a_fresh_file(tmp_path: Path) -> None:
    path = _write(tmp_path, range(3), 0.0)
    _write(tmp_path, range(1), 50.0)
    assert [row["x"] for row in read_metrics(path)] == [50.0]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = _write(tmp_path, range(3), 0.0)
    path.write_text(path.read_text() + '{"step": 3, "ti')
    assert len(read_metrics(path)) == 3
    _write(tmp_path, range(3, 4), 0.0, start_step=9)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "bad", ["garbage", "[1]", '{"x": 1}', '{"step": 1, "x": null}', '{"step": 1, "x": "zero"}']
)
def test_other_damage_is_named(tmp_path: Path, bad: str) -> None:
    path = _write(tmp_path, range(2), 0.0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], bad, lines[1]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        MetricsLogger(tmp_path, start_step=1)
    assert bad in path.read_text()  # nothing is thrown away


@pytest.mark.parametrize("bad", [b"\xff\xfe garbage", b'{"step": 1, "x": ' + b"[" * 100000])
def test_bytes_and_nesting_are_named(tmp_path: Path, bad: bytes) -> None:
    path = _write(tmp_path, range(2), 0.0)
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bad + b"\n" + last)
    for read in (read_metrics, lambda path: MetricsLogger(path.parent, start_step=1)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of metrics"):
            read(path)
    path.write_bytes(first + last + bad)  # cut in the middle of a line
    assert len(read_metrics(path)) == 2


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    with MetricsLogger(tmp_path, board) as logger:
        for step in range(4):
            logger.log(step, {"rollout/reward_mean": step / 2})
    with MetricsLogger(tmp_path, board, start_step=2) as logger:
        logger.log(2, {"rollout/reward_mean": 9.0})
    events = EventAccumulator(str(board))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward_mean")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 9.0),
    ]


def test_without_tensorboard_only_one_file_is_written(tmp_path: Path) -> None:
    _write(tmp_path, range(1), 0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_a_kill_after_the_checkpoint_has_lost(tmp_path: Path) -> None:
    """The checkpoint has its numbers. A run in its own folder begins with its own lines."""
    path = _write(tmp_path, range(1, 3), 0.0)
    last = to_json({"x": 3.25, "y": float("nan")})
    for saved in (last, to_json({"x": 99.0})):
        MetricsLogger(tmp_path, start_step=4, last=saved).close()
        assert [(row["step"], row["x"]) for row in read_metrics(path)] == [
            (1, 1.0),
            (2, 2.0),
            (3, 3.25),
        ]
    assert math.isnan(read_metrics(path)[-1]["y"])
    MetricsLogger(tmp_path / "other", start_step=4, last=last).close()
    assert read_metrics(tmp_path / "other" / "metrics.jsonl") == []
