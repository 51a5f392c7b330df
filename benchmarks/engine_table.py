"""Compare runs of the demo: score, and seconds by phase over the whole RL stage, including
evaluations.

    python benchmarks/engine_table.py outputs/engines/local-sync outputs/engines/sglang-async

`sampling` is the time that rollouts took to be sampled and graded; `waiting` is the part of it for
which the training stood still, all of it
without async rollouts; `overlap` is the share of the other part. What is left of the whole is
bookkeeping.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_like.metrics.logger import read_metrics
from slime_like.metrics.timers import SAMPLING_SECONDS, STEP_SECONDS

SCORE = "eval/heldout/mean"
HEAD = (
    "run",
    "rollouts",
    "score",
    "whole",
    "sampling",
    "waiting",
    "training",
    "weights",
    "evaluation",
    "overlap",
)


def table_row(name: str, rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Table row of a run, from its logged metrics. Training time is that of log-probs and optimizer
    steps."""

    def total(*metrics: str) -> float:
        return sum(row.get(metric, 0.0) for row in rows for metric in metrics)

    scores = [row[SCORE] for row in rows if SCORE in row]
    rollouts = sum("rollout/reward_mean" in row for row in rows)
    waiting = total("perf/generate_s")
    sampling = total(SAMPLING_SECONDS) or waiting
    numbers = (
        total(STEP_SECONDS), sampling, waiting, total("perf/log_probs_s", "perf/train_s"),
        total("perf/sync_s"), total("perf/eval_s"),
    )  # fmt: skip
    score = f"{scores[0]:.3f} -> {scores[-1]:.3f}" if scores else "none"
    overlap = f"{max(0.0, 1 - waiting / sampling):.0%}" if sampling else "none"
    return (name, str(rollouts), score, *(f"{seconds:.1f}" for seconds in numbers), overlap)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders that scripts/demo.sh wrote")
    options = parser.parse_args()
    files = {run.name: run / "rl" / "metrics.jsonl" for run in options.runs}
    missing = [str(file) for file in files.values() if not file.is_file()]
    if missing:
        print(f"no metrics in {', '.join(missing)}", file=sys.stderr)
        return 1
    print(
        markdown(
            [HEAD, *(table_row(name, list(read_metrics(file))) for name, file in files.items())]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
