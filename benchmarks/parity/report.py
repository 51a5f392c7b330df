"""Format the results of the parity matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.parity.cells import LAYOUTS, PRECISIONS
from benchmarks.parity.results import WORDS, Found, over_limit

DOCS = tuple(
    Path(__file__).parents[2] / "docs" / language / "parity.md" for language in ("en", "zh")
)
BEGIN = "<!-- parity matrix: begin -->\n"
END = "<!-- parity matrix: end -->\n"


def table(found: Sequence[Found]) -> Iterator[str]:
    """One line per layout and kind of rows, one column per loss; then by precision the largest
    difference of each compared quantity."""
    losses = list(dict.fromkeys(f.cell.loss for f in found))
    lines: dict[tuple[str, str], dict[str, Found]] = {}
    for f in found:
        lines.setdefault((f.cell.layout, f.cell.line), {})[f.cell.loss] = f
    wrong = set(map(id, over_limit(found)))
    yield f"{'layout':26} {'rows':18}" + "".join(f"{loss:>9}" for loss in losses)
    for (layout, line), by_loss in lines.items():
        figures = "".join(
            f"{by_loss[loss].worst:9.1e}" if loss in by_loss else " " * 9 for loss in losses
        )
        yield f"{layout:26} {line:18}{figures}" + (
            "   OVER THE LIMIT" if any(id(f) in wrong for f in by_loss.values()) else ""
        )
    for precision in dict.fromkeys(f.cell.precision for f in found):
        own = [f for f in found if f.cell.precision == precision]
        yield f"{precision}: {len(own)} cells, limit {PRECISIONS[precision].limit:g}"
        for word in WORDS:
            worst = max(own, key=lambda f: f.of(word))
            yield f"  largest of {word}: {worst.of(word):.1e} ({worst.cell.name})"


def summary(found: Sequence[Found]) -> Iterator[str]:
    """One line per layout: by loss the largest float32 figure over all kinds of rows, and over all
    losses the largest figure of the other precisions."""
    losses = list(dict.fromkeys(f.cell.loss for f in found))
    others = [precision for precision in PRECISIONS if precision != "float32"]

    def largest(layout: str, precision: str, loss: str | None = None) -> str:
        own = [
            f.worst
            for f in found
            if f.cell.layout == layout
            and f.cell.precision == precision
            and loss in (None, f.cell.loss)
        ]
        if not own:
            return "-"
        return f"{max(own):.2f}" if precision == "bfloat16" else f"{max(own):.1e}"

    yield f"{'layout':26}{'cells':>6}" + "".join(f"{name:>10}" for name in (*losses, *others))
    for layout in [name for name in LAYOUTS if any(f.cell.layout == name for f in found)]:
        figures = [largest(layout, "float32", loss) for loss in losses] + [
            largest(layout, precision) for precision in others
        ]
        yield f"{layout:26}{sum(f.cell.layout == layout for f in found):6}" + "".join(
            f"{figure:>10}" for figure in figures
        )
    limits = ", ".join(f"{name} {precision.limit:g}" for name, precision in PRECISIONS.items())
    yield f"{len(found)} cells, {len(over_limit(found))} over the limits: {limits}"


def write_docs(found: Sequence[Found]) -> None:
    """Write the summary between the marks of the pages on parity."""
    block = "```text\n" + "\n".join(summary(found)) + "\n```\n"
    for path in DOCS:
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(before + BEGIN + block + END + rest.partition(END)[2], encoding="utf-8")
