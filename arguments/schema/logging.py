"""Output folder, logs, metrics and trackers."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class LoggingConfig(CheckedSettings):
    output_dir: str | None = arg(
        None,
        "Folder for metrics.jsonl, the plot and (without --tensorboard-dir) TensorBoard; default "
        "outputs/<time>.",
    )
    tensorboard_dir: str | None = arg(
        None,
        "Folder for TensorBoard; default <output-dir>/tensorboard.",
        idle_without="@tensorboard",
    )
    no_tensorboard: bool = arg(False, "Do not write TensorBoard files.")
    no_plot: bool = arg(False, "Do not draw report.png at the end of the run.")
    no_progress: bool = arg(False, "Print plain lines instead of a progress bar.")
    log_interval: int = arg(
        1,
        "Print a plain line every N rollouts (see --no-progress); metrics files have every "
        "rollout.",
        legal=AT_LEAST_ONE,
    )
    record_timeline: bool = arg(
        False,
        "Record the phases of each rank over time in timeline/ in the output folder; the report "
        "shows slow ranks.",
    )
    tracker: list[str] = arg(
        [],
        "Additional trackers for metrics, settings and the plot; jsonl and tensorboard (see "
        "--no-tensorboard) are always written. A tracker that fails or hangs is reported once, "
        "and the run continues. Packages, in the clone: pip install -e '.[wandb]', [mlflow], "
        "[trackio].",
        nargs="+",
    )
    tracker_project: str | None = arg(
        None,
        "Project (MLflow: experiment) of the trackers; default slime_like.",
        aliases=("--wandb-project", "--tb-project-name"),
        idle_without="tracker|use_wandb",
    )
    tracker_run_name: str | None = arg(
        None,
        "Name of the run in the trackers; default: the name of the output folder. W&B appends the "
        "run's id, and uses the name as group too.",
        aliases=("--wandb-group", "--tb-experiment-name"),
        idle_without="tracker|use_wandb",
    )
    use_wandb: bool = arg(False, "As --tracker wandb.")
    wandb_mode: str | None = arg(
        None,
        "Mode of W&B; default WANDB_MODE, else online. offline: files in the output folder, for "
        "wandb sync.",
        choices=("online", "offline", "disabled"),
        idle_without="@wandb",
    )
    wandb_team: str | None = arg(
        None,
        "Entity of W&B.",
        idle_without="@wandb",
    )
    wandb_host: str | None = arg(
        None,
        "URL of a self-hosted W&B server.",
        idle_without="@wandb",
    )
    wandb_key: str | None = arg(
        None,
        "W&B API key. It is visible in the process list; prefer the environment variable "
        "WANDB_API_KEY or wandb login.",
        idle_without="@wandb",
    )
    wandb_dir: str | None = arg(
        None,
        "Folder of W&B's files; default the output folder.",
        idle_without="@wandb",
    )
    wandb_run_id: str | None = arg(
        None,
        "Continue this run of W&B; default a new one.",
        idle_without="@wandb",
    )
    disable_wandb_random_suffix: bool = arg(
        False,
        "Do not add the run's id to --tracker-run-name in W&B.",
        idle_without="@wandb",
    )
    mlflow_tracking_uri: str | None = arg(
        None,
        "MLflow tracking server or database; default MLFLOW_TRACKING_URI, else "
        "<output-dir>/mlflow.db.",
        idle_without="@mlflow",
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers of --tracker and --use-wandb, without duplicates."""
        return tuple(dict.fromkeys([*self.tracker, *(["wandb"] if self.use_wandb else [])]))


@dataclass(frozen=True, slots=True)
class DebugConfig(CheckedSettings):
    save_debug_rollout_data: str | None = arg(
        None,
        "Record each rollout at this path (JSON and safetensors); {rollout_id} is replaced by its "
        "number, from 1.",
        excludes="load_debug_rollout_data",
    )
    load_debug_rollout_data: str | None = arg(
        None,
        "Read recorded rollouts from this path instead of generating them; {rollout_id} is "
        "replaced by their number, from 1.",
        excludes=("debug_rollout_only", "loss_type=sft_loss, which generates no rollouts"),
        required_with="debug_train_only",
    )
    debug_rollout_only: bool = arg(
        False,
        "Generate and grade only; no training.",
        excludes=(
            "debug_train_only",
            "loss_type=sft_loss, which generates no rollouts",
            "lora_rank, whose adapters would be missing; save the merged model (--save-hf) first",
        ),
    )
    debug_train_only: bool = arg(
        False,
        "Train only, from --load-debug-rollout-data; no engine is started.",
        excludes="loss_type=sft_loss, which generates no rollouts",
    )
    print_megatron_patches: bool = arg(False, "Print which megatron patches were applied, and why.")
