"""Experiment trackers: what one must have, and the table of those that --tracker names.

metrics.jsonl and TensorBoard files are written by `slime_like.metrics.logger` in any case; the
entries "jsonl" and "tensorboard" stand for them, so that all of them can be listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from slime_like.registry import Registry

if TYPE_CHECKING:
    from arguments.schema import LoggingConfig
    from slime_like.metrics.trackers.samples import Rows

BUILT_IN = ("jsonl", "tensorboard")
IDS_FILE = "trackers.json"  # in the run's folder: run ids by tracker, for resuming


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """Arguments for creating a tracker."""

    settings: LoggingConfig  # logging settings
    output_dir: Path  # of the run
    config: Mapping[str, object]  # the run's settings by flag, plain data without secrets
    resumed: bool = False  # the run continues the one that wrote `output_dir`

    @property
    def project(self) -> str:
        return self.settings.tracker_project or "slime_like"

    @property
    def name(self) -> str:
        """The run's display name."""
        return self.settings.tracker_run_name or self.output_dir.resolve().name

    def saved_id(self, tracker: str) -> str | None:
        """The id that the resumed run stored with `save_id`."""
        if not self.resumed:
            return None
        found = self._ids().get(tracker)
        return found if isinstance(found, str) else None

    def save_id(self, tracker: str, run_id: str) -> None:
        text = json.dumps({**self._ids(), tracker: run_id})
        (self.output_dir / IDS_FILE).write_text(text, encoding="utf-8")

    def _ids(self) -> dict[str, object]:
        try:
            found = json.loads((self.output_dir / IDS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Tracker(Protocol):
    """Interface of a tracker. It is called from one thread of rank 0, in order, without blocking
    training. A tracker that raises or hangs is disabled, and the run continues."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of rollout `step`, from 1; 0 is the evaluation before training. A step
        may be logged twice, the second time with all its metrics. Values may be NaN or infinite."""

    def attach(self, path: Path) -> None:
        """Attach a file of the run, e.g. the plot."""

    def finish(self) -> None:
        """End of the run: everything must be written or sent."""


@runtime_checkable
class SampleTracker(Protocol):
    """A tracker that also accepts tables of samples."""

    def log_samples(self, step: int, rows: Rows) -> None:
        """Log a few samples of rollout `step`, with the columns `samples.COLUMNS`."""


TrackerFactory = Callable[[TrackerContext], Tracker]
trackers: Registry[TrackerFactory] = Registry("tracker (--tracker)")

_HERE = "slime_like.metrics.trackers"
for _name, _class, _help in (
    ("wandb", "WandbTracker", "Weights & Biases; see --wandb-*."),
    ("mlflow", "MlflowTracker", "MLflow; see --mlflow-tracking-uri."),
    ("trackio", "TrackioTracker", "Trackio, on this machine."),
):
    trackers.add_lazy(_name, f"{_HERE}.{_name}:{_class}", help=_help)


def tracker_names() -> list[str]:
    """Legal values of --tracker."""
    return [*BUILT_IN, *trackers.names()]
