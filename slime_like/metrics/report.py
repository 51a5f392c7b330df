"""Summary of a run: a plot and a table from metrics.jsonl.

Alone: ``python -m slime_like.metrics.report outputs/run/metrics.jsonl``. The plot needs matplotlib
(the extra `tasks`); the table does not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from slime_like.metrics.health import meanings
from slime_like.metrics.logger import FILE_NAME, read_metrics
from slime_like.metrics.plot import Rows, eval_metrics, logged_metrics, series, write_plot
from slime_like.metrics.run_names import run_names
from slime_like.metrics.timers import STEP_SECONDS

# Rows of the table: metric and which value is best; eval/<set>/... and perf/... rows are added
# if logged.
Best = Literal["max", "min", None]
TABLE_METRICS: tuple[tuple[str, Best], ...] = (
    ("rollout/reward_mean", "max"),
    ("rollout/reward_std", None),
    ("rollout/response_length_mean", None),
    ("rollout/truncated_frac", "min"),
    ("rollout/special_token_frac", "min"),
    ("reward/zero_spread_group_frac", None),
    ("rollout/train_rollout_log_prob_diff_mean", "min"),
    ("train/loss", None),
    ("train/policy_loss", None),
    ("train/kl", None),
    ("train/ppo_kl", None),
    ("train/entropy", None),
    ("train/grad_norm", None),
    ("train/value_loss", "min"),
    ("rollout/explained_variance", "max"),
    ("train/lr", None),
    ("perf/tokens_per_s", "max"),
    ("perf/actor_train_tflops", "max"),
    ("perf/mfu", "max"),
    (STEP_SECONDS, "min"),
    ("perf/peak_rss_gb", "min"),
)


def summary_table(rows: Rows) -> Table:
    """First, last and best value of the main metrics, and the number of non-finite values if there
    are any."""
    # a row may contain only an evaluation
    rollouts = [row for row in rows if logged_metrics([row], ("rollout/", "train/"))]
    table = Table(
        title=f"{len(rollouts)} rollout{'' if len(rollouts) == 1 else 's'}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("metric", overflow="fold")  # in a narrow terminal only the names are folded
    for name in ("first", "last", "best"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    table.add_column("rollout", justify="right", no_wrap=True, min_width=7)
    evals: list[tuple[str, Best]] = [(name, "max") for name in eval_metrics(rows)]
    for metric, best in (*TABLE_METRICS[:1], *evals, *TABLE_METRICS[1:]):
        points = series(rows, metric)
        if not points:
            continue
        finite = [point for point in points if math.isfinite(point[1])]
        best_value = ""
        best_step = ""
        if best is not None and finite:
            step, value = (max if best == "max" else min)(finite, key=lambda point: point[1])
            best_value = _number(value)
            best_step = str(step)
        bad = len(points) - len(finite)
        label = metric + (f"  ({bad} not finite)" if bad else "")
        table.add_row(
            label,
            _number(points[0][1]),
            _number(points[-1][1]),
            best_value,
            best_step,
            style="red" if bad else None,
        )
    return table


def health_lines(rows: Rows) -> list[str]:
    """One line per rule of `health` that fired: in how many rollouts, since which, whether it is
    over, and what it means."""
    lines = []
    means = meanings(rows)
    last = max((step for step, _ in series(rows, "health/warnings")), default=0)
    for name in logged_metrics(rows, "health/"):
        if name == "health/warnings":
            continue
        steps = [step for step, value in series(rows, name) if value]
        if steps:
            count = f"{len(steps)} rollout" + ("s" if len(steps) > 1 else "")
            text = f"{name} held in {count}, first in rollout {steps[0]}"
            if steps[-1] < last:
                text = f"over: {text}, and no more since rollout {steps[-1] + 1}"
            else:
                text = f"warning: {text}"
            lines.append(f"{text}: {means[name]}" if name in means else text)
    return lines


def write_report(
    metrics_path: str | Path,
    png_path: str | Path | None = None,
    console: Console | None = None,
    *,
    only: Sequence[str] = (),
    plot: bool = True,
) -> Path | None:
    """Print the table and write the plot (default: ``report.png`` next to the metrics). Returns the
    plot's path; None without `plot`, or, after printing the reason, without matplotlib or
    metrics."""
    metrics_path = Path(metrics_path)
    console = console or Console()
    rows = read_metrics(metrics_path)
    if not rows:
        console.print(f"{metrics_path}: no rollout was logged", soft_wrap=True, highlight=False)
        return None
    console.print(summary_table(rows))
    for line in health_lines(rows):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if not plot:
        return None
    try:
        path = write_plot(
            rows,
            png_path or metrics_path.with_name("report.png"),
            title=run_names([metrics_path.parent])[0],
            only=only,
        )
    except ModuleNotFoundError as error:
        console.print(str(error), soft_wrap=True, highlight=False, markup=False)
        return None
    console.print(f"plot: {path}", soft_wrap=True, highlight=False, markup=False)
    return path


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plot and table of a finished or running run.")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of the run, or its folder")
    parser.add_argument(
        "--output", type=Path, help="PNG to write; default report.png beside the metrics"
    )
    parser.add_argument(
        "--panels", nargs="+", default=[], help="beginnings of panel titles; default all"
    )
    args = parser.parse_args(argv)
    path = args.metrics / FILE_NAME if args.metrics.is_dir() else args.metrics
    try:
        return 0 if write_report(path, args.output, only=args.panels) else 1
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
