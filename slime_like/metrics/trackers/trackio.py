"""Trackio, a tracker without a service: TRACKIO_DIR or the run's folder has the database, and
`trackio show` the dashboard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slime_like.metrics.trackers.base import TrackerContext
from slime_like.metrics.trackers.samples import COLUMNS, Rows


class TrackioTracker:
    def __init__(self, context: TrackerContext) -> None:
        # read when importing trackio
        os.environ.setdefault("TRACKIO_DIR", str(context.output_dir.resolve() / "trackio"))
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=context.project,
            name=context.name,
            config=dict(context.config),
            resume="allow" if context.resumed else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, rows: Rows) -> None:
        try:
            import pandas
        except ImportError:  # trackio works without it
            return
        frame = pandas.DataFrame(rows, columns=list(COLUMNS))
        self._run.log({"samples": self._trackio.Table(dataframe=frame)}, step=step)

    def attach(self, path: Path) -> None:
        self._run.log({path.stem: self._trackio.Image(str(path))})

    def finish(self) -> None:
        self._run.finish()
