"""MLflow: the server of --mlflow-tracking-uri or of its environment variable, else a database in
the run's folder (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from slime_like.metrics.trackers.base import TrackerContext
from slime_like.metrics.trackers.samples import COLUMNS, Rows

MOST = 1000  # metrics per call; at most 100 parameters
MOST_PARAMETERS = 100
LONGEST_PARAMETER = 500


class MlflowTracker:
    def __init__(self, context: TrackerContext) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        folder = context.output_dir.resolve()
        uri = context.settings.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client = mlflow.MlflowClient(uri or f"sqlite:///{folder}/mlflow.db")
        saved = context.saved_id("mlflow")
        self._run_id = saved or self._new_run(context, local=uri is None)
        context.save_id("mlflow", self._run_id)
        client.update_run(self._run_id, status="RUNNING")
        if saved:  # parameters are immutable
            return
        params = [
            Param(flag.lstrip("-"), str(value)[:LONGEST_PARAMETER])
            for flag, value in context.config.items()
        ]
        for i in range(0, len(params), MOST_PARAMETERS):
            client.log_batch(self._run_id, params=params[i : i + MOST_PARAMETERS])
        client.log_text(self._run_id, json.dumps(dict(context.config), indent=1), "config.json")

    def _new_run(self, context: TrackerContext, *, local: bool) -> str:
        found = self._client.get_experiment_by_name(context.project)
        if found is not None:
            experiment = found.experiment_id
        else:
            place = str(context.output_dir.resolve() / "mlflow_artifacts") if local else None
            experiment = self._client.create_experiment(context.project, place)
        return self._client.create_run(experiment, run_name=context.name).info.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        for i in range(0, len(metrics), MOST):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + MOST])

    def log_samples(self, step: int, rows: Rows) -> None:
        columns = {name: list(values) for name, values in zip(COLUMNS, zip(*rows))}
        if columns:
            self._client.log_table(self._run_id, columns, f"samples/{step:06d}.json")

    def attach(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)
