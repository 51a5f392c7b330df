"""Metrics of a run on disk: metrics.jsonl, and TensorBoard.

metrics.jsonl holds one JSON object a line: ``step`` (int), ``time`` (seconds since the epoch) and
the metrics by name. JSON has no non-finite numbers: they are written as the strings "NaN",
"Infinity" and "-Infinity", never as 0 and never left out. Finite values keep all their digits, so
that two runs can be compared bit by bit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.checkpoints.files import writes_to

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from slime_like.metrics.trackers.background import TrackerSet

FILE_NAME = "metrics.jsonl"
logger = logging.getLogger(__name__)
_RESERVED = frozenset({"step", "time"})


class MetricsLogger:
    """Writes metrics of one process (rank 0). On resume, lines of an earlier run in `output_dir`
    with step < start_step are kept, and later ones dropped, since they are written again. A
    truncated last line is dropped as well.

    Raises ValueError with file and line for a damaged metrics.jsonl.

    Args:
        tensorboard_dir: None writes no TensorBoard files.
        last: Metrics of step start_step - 1 from its checkpoint (`to_json`); they are written now
            if the process was killed after saving the checkpoint and before writing the line.
        trackers: Receive the same metrics.
    """

    def __init__(
        self,
        output_dir: str | Path,
        tensorboard_dir: str | Path | None = None,
        *,
        start_step: int = 0,
        last: Mapping[str, float | str] | None = None,
        trackers: TrackerSet | None = None,
    ) -> None:
        self.path = Path(output_dir) / FILE_NAME
        with writes_to("--output-dir", output_dir):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = _drop_from(self.path, start_step) if self.path.exists() else None
            self._file = self._open()
        self._pending: dict[int, str] = {}  # pending lines, by step
        self.trackers = trackers
        self._board: SummaryWriter | None = None
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            _silence_writer_thread()
            with writes_to("--tensorboard-dir", tensorboard_dir):
                self._board = SummaryWriter(str(tensorboard_dir), purge_step=start_step)
        if last is not None and kept is not None and start_step - 1 not in kept:
            self.log(start_step - 1, {name: _from_json(name, v) for name, v in last.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line before returning (without fsync: a power failure may lose it). On a full
        disk the line is kept and written with the next one."""
        assert not _RESERVED & values.keys(), f"metrics may not be called {sorted(_RESERVED)}"
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        row.update(to_json(values))
        self._pending[step] = json.dumps(row, allow_nan=False) + "\n"
        self._write_pending()
        self._log_to_board(step, values)
        if self.trackers is not None:
            self.trackers.log(step, values)

    def _open(self) -> FileIO:
        """Unbuffered, so that a failed write leaves no data in a buffer."""
        file = self.path.open("ab", buffering=0)
        self._size = file.tell()
        return file

    def _write_pending(self) -> None:
        """Write the pending lines; warns when the disk becomes full, and when it can be written
        again."""
        late = len(self._pending) - 1
        error = self._write("".join(self._pending.values()).encode())
        if error is None:
            self._pending.clear()
        if error is None and late:
            logger.warning(
                f"--output-dir {self.path}: can be written again; {late} earlier lines of metrics "
                "were added"
            )
        elif error is not None and not late:
            logger.warning(
                f"--output-dir {self.path}: cannot be written: {error.strerror or error}; make "
                "room there. Training continues; metrics are kept in memory and written when there "
                "is room, and are lost if the run ends before"
            )

    def _write(self, data: bytes) -> OSError | None:
        """Append all of `data`, or nothing."""
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._size)
            return error
        self._size += len(data)
        return None

    def _log_to_board(self, step: int, values: Mapping[str, float]) -> None:
        """Write to TensorBoard until the first error, after which its writer is unusable."""
        if self._board is None:
            return
        try:
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)
            self._board.flush()
        except OSError as error:
            logger.warning(
                f"--tensorboard-dir {self._board.log_dir}: cannot be written: "
                f"{error.strerror or error}; make room there. Training continues without "
                f"TensorBoard from step {step} on"
            )
            self._board = None

    def attach(self, path: Path) -> None:
        """Attach a file of the run, such as its plot, to the trackers."""
        if self.trackers is not None:
            self.trackers.attach(path)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics to the line of `step`, if it is the last one; otherwise write a new line."""
        before = self.row(step)
        if step not in self._pending:
            self._file.close()
            with writes_to("--output-dir", self.path):
                _drop_from(self.path, step)
            self._file = self._open()
        self.log(step, {**before, **values})

    def row(self, step: int) -> dict[str, float]:
        """The metrics of a written step; empty if there is none."""
        lines = [self._pending[step]] if step in self._pending else []
        rows = [_parse(line) for line in lines] or read_metrics(self.path)
        row = next((row for row in rows if row["step"] == step), {})
        return {name: value for name, value in row.items() if name not in _RESERVED}

    def close(self, finish_s: float | None = None) -> None:
        """Write pending lines and close everything. finish_s: time limit for the trackers; None:
        their usual limit."""
        if self._write("".join(self._pending.values()).encode()) is not None:
            logger.warning(
                f"--output-dir {self.path}: the metrics of {len(self._pending)} steps, from step "
                f"{min(self._pending)} on, are lost"
            )
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self.trackers is not None:
            self.trackers.close(finish_s)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _silence_writer_thread() -> None:
    """Suppress tracebacks of TensorBoard's writer thread: an error in it, such as a full disk, is
    raised again by the next call of the writer."""
    before: Callable[[threading.ExceptHookArgs], object] = threading.excepthook
    if getattr(before, "passes_tensorboard", False):
        return

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__.partition(".")[0] != "tensorboard":
            before(arguments)

    hook.passes_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def to_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """JSON-compatible values: NaN and infinity become strings."""
    return {name: _to_json(float(value)) for name, value in values.items()}


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl in order, with non-finite values. A truncated last line is
    ignored; any other damage raises ValueError with file and line."""
    return [row for _, row in _rows(Path(path))]


def _rows(path: Path) -> list[tuple[str, dict[str, float]]]:
    """(line with its newline, row) of every complete line."""
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
            rows.append((text, _parse(text)))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(
                f"{path}:{number}: not a line of metrics ({error}); repair or remove the file"
            ) from error
    return rows


def _parse(line: str) -> dict[str, float]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError('expected an object with an integer "step"')
    if not line.endswith("\n"):
        raise ValueError("the line is truncated")
    return {
        name: value if name == "step" else _from_json(name, value) for name, value in row.items()
    }


def _to_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"


def _from_json(name: str, value: object) -> float:
    if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise ValueError(f"{name!r} is {value!r}, neither a number nor NaN, Infinity or -Infinity")


def _drop_from(path: Path, start_step: int) -> set[float]:
    """Atomically rewrite the file without steps >= start_step. Returns the remaining steps."""
    kept = [(line, row["step"]) for line, row in _rows(path) if row["step"] < start_step]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line for line, _ in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return {step for _, step in kept}
