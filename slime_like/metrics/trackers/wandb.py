"""Weights & Biases. Without --wandb-mode and --wandb-key its own environment variables and login
decide; --wandb-mode offline writes files that `wandb sync` sends later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slime_like.metrics.trackers.base import TrackerContext
from slime_like.metrics.trackers.samples import COLUMNS, Rows


class WandbTracker:
    """W&B tracker. The x-axis of its charts is the metric `rollout`, because W&B drops steps below
    the last one, which a resumed run repeats."""

    def __init__(self, context: TrackerContext) -> None:
        import wandb

        self._wandb = wandb
        flags = context.settings
        if flags.wandb_key is not None and flags.wandb_mode in (None, "online"):
            wandb.login(key=flags.wandb_key, host=flags.wandb_host)
        run_id = (
            flags.wandb_run_id or context.saved_id("wandb") or wandb.sdk.lib.runid.generate_id()
        )
        group = flags.tracker_run_name
        if group is not None and not flags.disable_wandb_random_suffix:
            group = f"{group}_{run_id}"
        # W&B's metadata would contain the raw command line, including keys
        settings = wandb.Settings(silent=True, console="off", x_disable_meta=True)
        if flags.wandb_host is not None:
            settings.base_url = flags.wandb_host
        directory = Path(flags.wandb_dir or context.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=context.project,
            entity=flags.wandb_team,
            group=group,
            name=group or context.name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            mode=flags.wandb_mode,
            config=dict(context.config),
            settings=settings,
        )
        self._run.define_metric("rollout")
        self._run.define_metric("*", step_metric="rollout")
        context.save_id("wandb", run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "rollout": step})

    def log_samples(self, step: int, rows: Rows) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"samples": table, "rollout": step})

    def attach(self, path: Path) -> None:
        self._run.log({path.stem: self._wandb.Image(str(path))})

    def finish(self) -> None:
        self._run.finish()
