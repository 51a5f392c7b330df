"""Training as a function call, in a notebook, a test or a program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments.run_config import RunConfig
from arguments.surroundings import require_surroundings
from slime_like.metrics.logger import read_metrics
from slime_like.trainer.launch import joined_ranks, prepare, shared_output_dir, train_in


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that ended without an error."""

    output_dir: Path
    interrupted: bool  # by a signal, before its last rollout

    @property
    def metrics(self) -> Sequence[dict[str, float]]:
        """The rows of metrics.jsonl, one for each rollout and evaluation."""
        return read_metrics(self.output_dir / "metrics.jsonl")


def train(config: RunConfig) -> FinishedRun:
    """Train in this process, as `train.py` does with the same settings.

    Without torchrun this is a run of one process. Under torchrun every process calls it, with a
    config of that `world_size`. Call it in the main thread, which handles SIGINT and SIGTERM during
    the run. Several runs may follow each other in one process.

        config = slime_like.make_config(hf_checkpoint="model", prompt_data="rows.jsonl", ...)
        print(slime_like.train(config).metrics[-1]["rollout/reward_mean"])

    Args:
        config: From `make_config` or `parse_args`.

    Raises:
        RunError: A guard, an engine, a folder that another run uses, or a process in which nothing
            can run (python -O).
        ValueError: Data, checkpoints or user functions that cannot be used; --preflight.
    """
    require_surroundings()
    if config.preflight.preflight:
        raise ValueError("--preflight: a report without training; use `slime-like preflight`")
    rank = int(os.environ.get("RANK", "0"))
    prepare(config, rank, config.warnings)
    with joined_ranks(config, rank) as (layout, activity):
        output_dir = shared_output_dir(config)
        status = train_in(output_dir, config, layout, activity, lambda what: None)
    return FinishedRun(output_dir, interrupted=status != 0)
