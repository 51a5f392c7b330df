"""Every starter of `slime-like new` over several seeds: a table and a picture of the curves.

    python benchmarks/starter_table.py --output-dir outputs/starters               # one by one
    python benchmarks/starter_table.py --output-dir outputs/starters --only lora --seeds 1 2
    python benchmarks/starter_table.py --output-dir outputs/starters --write-docs  # into the docs

A run that is there is not repeated. --write-docs makes no run: it puts those that are there into
docs/*/starters.md and docs/images/starters.png, and those of the default starter with one setting
changed (--changed) into docs/*/first_runs.md and docs/images/starter_settings.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime_like.cli.new import DEFAULT, STARTERS  # noqa: E402
from tests.learning.starters import SECONDS, held_out, train  # noqa: E402

PICTURE = ROOT / "docs/images/starters.png"
CHANGED_PICTURE = ROOT / "docs/images/starter_settings.png"
BEGIN = "<!-- starters: made by benchmarks/starter_table.py -->\n"
END = "<!-- end of the starters -->"
HEADINGS = {
    "en": ("starter", "held-out rows, before -> after, by seed", "CPU seconds"),
    "zh": ("起步项目", "留出的行，各种子：训练前 -> 训练后", "CPU 秒数"),
}
# the default starter with one setting changed, seed 1
CHANGES = ("", "--rollout-max-response-len 2", "--lr 1.5e-2", "--entropy-coef 0")
CHANGED_HEADINGS = {
    "en": ("seed 1, with only this changed", "held out, by rollout", "CPU seconds", "nothing"),
    "zh": ("种子 1，只改这一项", "留出的行，各 rollout", "CPU 秒数", "无"),
}


@dataclass(frozen=True)
class Curve:
    """One training of a starter."""

    points: list[tuple[int, float]]  # (rollout, mean reward of the held-out rows)
    cpu_s: float


def folder_of(starter: str, seed: int, out: Path, changed: str = "") -> Path:
    return out / f"{starter}-{seed}{changed.replace(' ', '_')}"


def measure(starter: str, seed: int, out: Path, changed: str = "") -> None:
    """Train, unless there is a result. changed: flags of the training."""
    folder = folder_of(starter, seed, out, changed)
    if not (folder / SECONDS).exists():
        shutil.rmtree(folder, ignore_errors=True)
        train(folder, starter, seed, changed)


def curves(starter: str, seeds: Sequence[int], out: Path) -> dict[int, Curve]:
    """The results that are there, by seed."""
    found = {seed: curve(folder_of(starter, seed, out)) for seed in seeds}
    return {seed: result for seed, result in found.items() if result is not None}


def curve(folder: Path) -> Curve | None:
    """The result of a project; None without one."""
    if not (folder / SECONDS).exists():
        return None
    cpu_s = json.loads((folder / SECONDS).read_text(encoding="utf-8"))
    return Curve(held_out(folder), cpu_s)


def changed_curves(out: Path) -> dict[str, Curve]:
    """The results of the default starter with one setting changed, by the change."""
    found = {change: curve(folder_of(DEFAULT, 1, out, change)) for change in CHANGES}
    return {change: result for change, result in found.items() if result is not None}


def changed_table(out: Path, language: str) -> str:
    """Table of `changed_curves`, in Markdown."""
    first, held, seconds, nothing = CHANGED_HEADINGS[language]
    lines = [f"| {first} | {held} | {seconds} |", "|---|---|---:|"]
    for change, result in changed_curves(out).items():
        scores = ", ".join(f"{step}: {score:.2f}" for step, score in result.points)
        lines.append(f"| {f'`{change}`' if change else nothing} | {scores} | {result.cpu_s:.0f} |")
    return "\n".join(lines) + "\n"


def draw_changed(out: Path, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    for change, result in changed_curves(out).items():
        steps, scores = zip(*result.points)
        width = 1.6 if change else 3
        axis.plot(
            steps, scores, marker="o", markersize=3, linewidth=width, label=change or "run.yaml"
        )
    axis.set_ylim(0, 1.03)
    axis.grid(alpha=0.3)
    axis.set_xlabel("rollout")
    axis.set_ylabel("reward of held-out rows")
    axis.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)


def table(seeds: Sequence[int], out: Path, language: str) -> str:
    """Table of the existing results, in Markdown."""
    lines = [f"| {' | '.join(HEADINGS[language])} |", "|---|---|---:|"]
    for starter in STARTERS:
        if found := curves(starter, seeds, out):
            runs = ", ".join(
                f"{seed}: {result.points[0][1]:.2f} -> {result.points[-1][1]:.2f}"
                for seed, result in found.items()
            )
            seconds = sum(result.cpu_s for result in found.values()) / len(found)
            lines.append(f"| `{starter}` | {runs} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def draw(seeds: Sequence[int], out: Path, path: Path) -> None:
    """One panel a starter, one line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = list(figure.subplots(2, 4, sharey=True).flat)
    legend = axes.pop()
    for axis, starter in zip(axes, STARTERS, strict=True):
        for seed, found in curves(starter, seeds, out).items():
            steps, scores = zip(*found.points)
            axis.plot(steps, scores, marker="o", markersize=3, label=f"seed {seed}")
        axis.set_title(starter, fontsize=11)
        axis.set_ylim(0, 1.03)
        axis.grid(alpha=0.3)
        axis.set_xlabel("rollout, or step of run.yaml", fontsize=8)
    legend.axis("off")
    legend.legend(
        *axes[0].get_legend_handles_labels(), loc="center", title="reward of held-out rows"
    )
    figure.savefig(path, dpi=110)


def write_docs(seeds: Sequence[int], out: Path) -> None:
    for language in HEADINGS:
        put(ROOT / f"docs/{language}/starters.md", table(seeds, out, language))
        put(ROOT / f"docs/{language}/first_runs.md", changed_table(out, language))
    draw(seeds, out, PICTURE)
    draw_changed(out, CHANGED_PICTURE)


def put(page: Path, text: str) -> None:
    """Replace what is between BEGIN and END of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, page
    page.write_text(before + begin + text + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(STARTERS), choices=STARTERS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--changed", action="store_true", help="the default starter, changed")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    out = options.output_dir.resolve()
    if options.write_docs:
        write_docs(options.seeds, out)
        return
    if options.changed:
        for change in CHANGES:
            measure(DEFAULT, 1, out, change)
        print(changed_table(out, "en"))
        return
    for starter in options.only:
        for seed in options.seeds:
            measure(starter, seed, out)
    print(table(options.seeds, out, "en"))


if __name__ == "__main__":
    main()
