"""The curves of a run as a PNG.

Colours are those of Okabe and Ito, with two of Tol's, which stay apart for colour-blind readers. A
phase has one colour in every plot.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.extras import pip_install
from slime_like.metrics.timers import STEP_SECONDS, phase_metric, phase_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
GREY = "#7F7F7F"
INDIGO = "#332288"
WINE = "#882255"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GREY)
PHASE_COLOURS = {
    "generate": BLUE,
    "balance": INDIGO,
    "log_probs": ORANGE,
    "values": SKY,
    "train_critic": PURPLE,
    "train": GREEN,
    "sync": VERMILION,
    "eval": YELLOW,
    "save": WINE,
}
PHASES_TITLE = "Seconds per rollout, by phase"
OTHER_COLOUR = GREY  # time outside of all phases
PHASES_LEGEND_IN = 1.35  # inches to the right of the last panel
SMOOTH_FROM = 40  # number of points from which a smoothed curve is added
NO_MATPLOTLIB = f"the plot needs matplotlib, which is not installed: {pip_install('tasks')}"

Rows = Sequence[dict[str, float]]
Points = list[tuple[int, float]]  # (rollout, value)


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    # (label, metric, colour); metrics that were never logged are skipped, and so are panels without
    # curves
    curves: tuple[tuple[str, str, str], ...]
    log_scale: bool = False
    band: str | None = None  # metric of a standard deviation, drawn around the first curve
    is_share: bool = False  # values between 0 and 1, with both on the axis


PANELS = (
    Panel(
        "Reward",
        (("mean, ± std of the samples", "rollout/reward_mean", BLUE),),
        band="rollout/reward_std",
    ),
    Panel(
        "KL",
        (
            ("to the reference (train/kl)", "train/kl", BLUE),
            ("old to new policy (train/ppo_kl)", "train/ppo_kl", ORANGE),
        ),
    ),
    Panel("Entropy", (("per token", "train/entropy", GREEN),)),
    Panel(
        "Response length, tokens",
        (
            ("mean", "rollout/response_length_mean", BLUE),
            ("longest", "rollout/response_length_max", SKY),
        ),
    ),
    Panel(
        "Truncated, special tokens, no spread",
        (
            ("responses cut at the limit", "rollout/truncated_frac", VERMILION),
            ("special tokens inside answers", "rollout/special_token_frac", PURPLE),
            ("groups of equal rewards", "reward/zero_spread_group_frac", GREY),
        ),
        is_share=True,
    ),
    Panel(
        "Gradient norm before clipping",
        (("policy", "train/grad_norm", BLUE), ("critic", "train/critic_grad_norm", PURPLE)),
        log_scale=True,
    ),
    Panel("Critic: value loss", (("per token", "train/value_loss", PURPLE),), log_scale=True),
    Panel(
        "Critic: explained variance of returns",
        (("1 is perfect, 0 a constant", "rollout/explained_variance", PURPLE),),
    ),
    Panel(
        "Log-prob difference, trainer and sampler",
        (("mean absolute", "rollout/train_rollout_log_prob_diff_mean", VERMILION),),
        log_scale=True,
    ),
)


def series(rows: Rows, metric: str) -> Points:
    """(rollout, value) wherever the metric was logged, with non-finite values."""
    return [(int(row["step"]), row[metric]) for row in rows if metric in row]


def eval_metrics(rows: Rows) -> list[str]:
    return logged_metrics(rows, "eval/")


def logged_metrics(rows: Rows, prefix: str | tuple[str, ...]) -> list[str]:
    """Names of the metrics with such a prefix that any row has, sorted."""
    return sorted(name for name in set[str]().union(*rows) if name.startswith(prefix))


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred moving average over about a tenth of the curve, narrower at its ends; non-finite
    values are ignored."""
    half = max(len(values) // 20, 1)
    result = []
    for i in range(len(values)):
        window = list(filter(math.isfinite, values[max(i - half, 0) : i + half + 1]))
        result.append(sum(window) / len(window) if window else math.nan)
    return result


def write_plot(rows: Rows, path: str | Path, title: str = "", *, only: Sequence[str] = ()) -> Path:
    """Draw the curves as a PNG.

    Args:
        rows: Of metrics.jsonl.
        path: The file to write; folders are created.
        title: Above all panels.
        only: Prefixes of panel titles, case-insensitive, to select panels; empty for all panels
            with data.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says what to install.
        ValueError: There are no rows, or no panel with these titles has data.
    """
    if not rows:
        raise ValueError("no rollout was logged: nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_MATPLOTLIB) from error
    panels = _panels_with_data(rows, only)
    has_phases = _is_selected(PHASES_TITLE, only) and any(map(_has_seconds, rows))
    if only and not panels and not has_phases:
        raise ValueError(f"--panels {' '.join(only)}: no panel with data has such a title")
    count = len(panels) + has_phases
    columns = min(3, max(count, 1))
    lines = max(math.ceil(count / columns), 1)
    width = 5.4 * columns
    height = 3.6 * lines + 0.4
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)  # no display, and no pyplot state
    # constant margins: a layout engine measures every label, which takes longer than drawing
    grid = {
        "left": 0.7 / width,
        "right": 1 - (PHASES_LEGEND_IN if has_phases else 0.15) / width,
        "bottom": 0.55 / height,
        "top": 1 - 0.75 / height,
        "wspace": 0.22,
        "hspace": 0.36,
    }
    axes = figure.subplots(lines, columns, squeeze=False, gridspec_kw=grid).flatten()
    for axis, panel in zip(axes, panels):
        _draw_panel(axis, panel, rows)
    if has_phases:
        _draw_phases(axes[len(panels)], rows)
    for axis in axes[count:]:
        axis.remove()
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    titles = [axis.get_title(loc="left") for axis in axes[:count]]
    figure.savefig(path, dpi=120, metadata={"Description": "; ".join(titles)})
    return path


def _panels_with_data(rows: Rows, only: Sequence[str]) -> list[Panel]:
    """The selected panels, each with the curves that have data."""
    several = (
        Panel("Evaluation score", _curves_of_each(rows, "eval/", "/mean")),
        Panel("Reward by source", _curves_of_each(rows, "rollout/", "/reward_mean")),
        Panel(
            "Pass rate by source", _curves_of_each(rows, "rollout/", "/pass_rate"), is_share=True
        ),
    )
    panels = []
    for panel in (PANELS[0], *several, *PANELS[1:]):
        curves = tuple(curve for curve in panel.curves if series(rows, curve[1]))
        if curves and _is_selected(panel.title, only):
            panels.append(replace(panel, curves=curves))
    return panels


def _curves_of_each(rows: Rows, start: str, end: str) -> tuple[tuple[str, str, str], ...]:
    """A curve for each evaluation set, or for each source of a mix, with its name."""
    names = [name for name in logged_metrics(rows, start) if name.endswith(end)]
    curves = list[tuple[str, str, str]]()
    for name in names:
        label = name[len(start) : -len(end)]
        if label:  # "rollout/reward_mean" is of all sources
            curves.append((label, name, CYCLE[len(curves) % len(CYCLE)]))
    return tuple(curves)


def _draw_panel(axis: Axes, panel: Panel, rows: Rows) -> None:
    non_finite = 0
    all_positive = True
    for label, metric, colour in panel.curves:
        points = series(rows, metric)
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        finite = list(filter(math.isfinite, values))
        non_finite += len(values) - len(finite)
        all_positive = all_positive and min(finite, default=1.0) > 0
        if len(values) < SMOOTH_FROM:
            axis.plot(steps, values, color=colour, lw=1.8, marker="o", ms=3.5, label=label)
        else:
            axis.plot(steps, values, color=colour, lw=1, alpha=0.35)
            axis.plot(steps, smoothed(values), color=colour, lw=2, label=label)
        if len(values) == 1:
            axis.set_xlim(steps[0] - 1, steps[0] + 1)
    if panel.band is not None and (band := dict(series(rows, panel.band))):
        _, metric, colour = panel.curves[0]
        points = [(step, value) for step, value in series(rows, metric) if step in band]
        low = [value - band[step] for step, value in points]
        high = [value + band[step] for step, value in points]
        steps = [step for step, _ in points]
        axis.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
    if panel.log_scale and all_positive:
        axis.set_yscale("log")
    if panel.is_share:
        axis.set_ylim(-0.03, 1.03)
    _finish(axis, panel.title + (f" ({non_finite} not finite)" if non_finite else ""))
    axis.legend(frameon=False, fontsize=9, loc="best")


def _draw_phases(axis: Axes, rows: Rows) -> None:
    """Seconds of each phase, stacked, with the remaining time on top. A rollout is as wide as one
    step of the axis."""
    names = list(phase_seconds(dict.fromkeys(logged_metrics(rows, "perf/"), 0.0)))
    rows = list(filter(_has_seconds, rows))
    steps = [int(row["step"]) for row in rows]
    layers: list[list[float]] = [[] for _ in (*names, "other")]
    for row in rows:
        seconds = [row.get(phase_metric(name), 0.0) for name in names]
        total = row.get(STEP_SECONDS, sum(phase_seconds(row).values()))
        for layer, value in zip(layers, (*seconds, max(total - sum(seconds), 0.0)), strict=True):
            layer.append(value)
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
    colours = [*map(phase_colour, names), OTHER_COLOUR]
    labels = [name.replace("_", "-") for name in names] + ["other"]
    axis.stackplot(
        edges,
        *([*layer, layer[-1]] for layer in layers),
        labels=labels,
        colors=colours,
        step="post",
        lw=0,
    )
    _finish(axis, PHASES_TITLE)
    axis.set_xlim(edges[0], edges[-1])
    axis.set_ylim(bottom=0)
    handles, shown = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1],
        shown[::-1],
        frameon=False,
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )


def _is_selected(title: str, only: Sequence[str]) -> bool:
    return not only or title.lower().startswith(tuple(prefix.lower() for prefix in only))


def _has_seconds(row: Mapping[str, float]) -> bool:
    return STEP_SECONDS in row or bool(phase_seconds(row))


def phase_colour(name: str) -> str:
    """The colour of a phase: the same in every plot, independent of a run's other phases.

    Args:
        name: As in ``perf/<name>_s``; another phase shares the colour of one of `PHASE_COLOURS`.
    """
    colours = list(PHASE_COLOURS.values())
    return PHASE_COLOURS.get(name, colours[zlib.crc32(name.encode()) % len(colours)])


def _finish(axis: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=11, fontweight="bold", loc="left")
    axis.set_xlabel("rollout", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axis.tick_params(which="both", labelsize=9)
    axis.grid(alpha=0.25, lw=0.6)
    axis.margins(x=0.02)
    axis.spines[["top", "right"]].set_visible(False)
