"""What a run tells, and where."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, arg


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    output_dir: str | None = arg(
        None,
        "Folder for metrics.jsonl, the plot and, unless set apart, TensorBoard; default outputs/<time>.",
    )
    tensorboard_dir: str | None = arg(
        None, "Folder for TensorBoard; default <output-dir>/tensorboard."
    )
    no_tensorboard: bool = arg(False, "Do not write TensorBoard files.")
    no_plot: bool = arg(False, "Do not draw report.png at the end of the run.")
    no_progress: bool = arg(False, "Print plain lines in place of a progress bar.")
    log_interval: int = arg(
        1,
        "Rollouts between two plain lines (see --no-progress); the files have every rollout.",
        legal=AT_LEAST_ONE,
    )


@dataclass(frozen=True, slots=True)
class DebugConfig:
    save_debug_rollout_data: str | None = arg(
        None,
        "Write each rollout to this path (JSON and safetensors); {rollout_id} becomes its number, from 1.",
        excludes="load_debug_rollout_data",
    )
    load_debug_rollout_data: str | None = arg(
        None,
        "Read rollouts from this path in place of generating them; {rollout_id} becomes their number, from 1.",
        excludes="debug_rollout_only",
        required_with="debug_train_only",
    )
    debug_rollout_only: bool = arg(
        False, "Generate and grade only; no training.", excludes="debug_train_only"
    )
    debug_train_only: bool = arg(
        False, "Train only, from --load-debug-rollout-data; no engine is made."
    )
    print_megatron_patches: bool = arg(False, "Print which megatron patches were applied, and why.")
