"""Draw how costs grow, from the results of three benchmarks:

    python benchmarks/bench_head.py --curve 256 512 1024 2048 4096 --json head.json
    python benchmarks/bench_packing.py --json packing.json
    python benchmarks/bench_balancing.py --json balancing.json
    python benchmarks/plot_costs.py --head head.json --packing packing.json --balancing
    balancing.json [--output FILE] [--docs]

Both axes are logarithmic. The dashed line is proportional to the horizontal axis and goes through
the middle point; the number is the slope of the measured curve, 1 where a cost is proportional.
--docs puts the same numbers as a table into docs/*/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_common import growth_exponent  # noqa: E402

TARGET = ROOT / "docs" / "images" / "costs.png"
BEGIN = "<!-- costs: begin -->\n"
END = "<!-- costs: end -->\n"
HEADERS = {
    "en": "| tokens | head, ms | µs each | sequences | packing, ms | µs each | sequences | "
    "balancing, ms | µs each |",
    "zh": "| token 数 | 输出头，ms | 每个 µs | 序列数 | 打包，ms | 每条 µs | 序列数 | "
    "均衡，ms | 每条 µs |",
}


@dataclass(frozen=True)
class Curve:
    title: str
    sizes_of: str
    sizes: Sequence[float]
    milliseconds: Sequence[float]


def curves(head: Any, packing: Any, balancing: Any) -> list[Curve]:
    """Curves from the benchmarks' results. Raises ValueError if those of the head have no curve."""
    if "curve" not in head:
        raise ValueError(
            "the head's results have no curve: run benchmarks/bench_head.py with --curve"
        )
    by_tokens = {int(tokens): row["seconds"] for tokens, row in head["curve"].items()}
    return [
        Curve(
            "lean head, forward and backward",
            "tokens",
            list(by_tokens),
            [1e3 * s for s in by_tokens.values()],
        ),
        Curve("packing by token budget", "sequences", *of_growth(packing)),
        Curve("balancing, 128 sequences a rank", "sequences", *of_growth(balancing)),
    ]


def of_growth(results: Any) -> tuple[list[float], list[float]]:
    return [row["sequences"] for row in results["growth"]], [row["ms"] for row in results["growth"]]


def draw(found: Sequence[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter, NullLocator

    figure, axes = plt.subplots(
        1, len(found), figsize=(4.0 * len(found), 3.4), layout="constrained"
    )
    for axis, curve in zip(axes, found, strict=True):
        middle = len(curve.sizes) // 2
        proportional = [
            curve.milliseconds[middle] * size / curve.sizes[middle] for size in curve.sizes
        ]
        axis.loglog(
            curve.sizes,
            proportional,
            color="grey",
            linewidth=1.0,
            linestyle="--",
            label="proportional",
        )
        slope = growth_exponent(curve.sizes, curve.milliseconds)
        axis.loglog(
            curve.sizes,
            curve.milliseconds,
            color="tab:blue",
            marker="o",
            label=f"measured, slope {slope:.2f}",
        )
        axis.set_xticks(
            curve.sizes,
            [f"{size / 1024:g}k" if size >= 1024 else f"{size:g}" for size in curve.sizes],
        )
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axis.set_title(curve.title, fontsize=10)
        axis.set_xlabel(curve.sizes_of)
        axis.set_ylabel("ms of one core")
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def rows(found: Sequence[Curve]) -> list[str]:
    """The curves side by side, as rows of a table without header."""
    lines = []
    for number in range(max(len(curve.sizes) for curve in found)):
        cells = []
        for curve in found:
            if number < len(curve.sizes):
                size = curve.sizes[number]
                ms = curve.milliseconds[number]
                cells += [f"{size:.0f}", f"{ms:.1f}", f"{1e3 * ms / size:.2f}"]
            else:
                cells += [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_docs(found: Sequence[Curve]) -> None:
    for language, header in HEADERS.items():
        path = ROOT / "docs" / language / "performance.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        table = "\n".join([header, "|---" * 9 + "|", *rows(found)]) + "\n"
        path.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("head", "packing", "balancing"):
        parser.add_argument(
            f"--{name}",
            type=Path,
            required=True,
            metavar="FILE",
            help=f"what scripts/bench_{name}.py --json wrote",
        )
    parser.add_argument("--output", type=Path, default=TARGET)
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/*/performance.md"
    )
    options = parser.parse_args(argv)
    results = [
        json.loads(path.read_text(encoding="utf-8"))["results"]
        for path in (options.head, options.packing, options.balancing)
    ]
    found = curves(*results)
    draw(found, options.output)
    if options.docs:
        write_docs(found)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
